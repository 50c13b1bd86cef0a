"""Rates by epoch, schedules by step, and what is refused."""

import itertools
import re

import pytest
import tiny_config
from conftest import fixture_names, load_fixture

from cropr_jax import models
from cropr_jax.errors import ConfigError
from cropr_jax.train import curriculum, fields, recipe


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("optim_segm"))
def test_released_rates(name):
    for case, expected in load_fixture(name)[1]["pruning_rate_by_epoch"].items():
        final, epochs = map(int, re.fullmatch(r"R=(\d+),epochs=(\d+)", case).groups())
        rising = curriculum.rates(0, final, epochs // 2)
        assert list(rising) + [final] * (epochs - len(rising)) == expected


def test_coarse_rates():
    assert set(curriculum.rates(0, 40, 32, step=8)) == {0, 8, 16, 24, 32, 40}
    # The last one is R itself, whatever the step.
    assert curriculum.rates(1, 13, 5, step=4) == (0, 4, 4, 8, 13)


def config_with(total_steps=None, reduction=None, **settings):
    config = tiny_config.get_config()
    with config.unlocked():
        config.curriculum = settings
        config.total_steps = total_steps
        config.model.reduction.update(reduction or {})
    return config


def removed(resolved):
    return [resolved.curriculum.at(step).removed for step in range(resolved.total_steps)]


def test_schedules_by_step():
    """One site; a prefix token more goes with the first, but none at rate 0."""
    assert removed(recipe.resolve(config_with(epochs=0))) == [4] * 8
    unset = dict.fromkeys(("epochs", "start", "step"))
    assert removed(recipe.resolve(config_with(**unset))) == [4] * 8
    assert removed(recipe.resolve(config_with(epochs=1))) == [0] * 4 + [4] * 4
    found = removed(recipe.resolve(config_with(epochs=2, start=1)))
    assert found == [2] * 4 + [4] * 4
    # A shortened run keeps the shares.
    assert removed(recipe.resolve(config_with(epochs=1, total_steps=2))) == [0, 4]
    assert removed(recipe.resolve(config_with(epochs=1, total_steps=5))) == [0, 0, 0, 4, 4]


@pytest.mark.parametrize("head", models.HEADS)
def test_every_stage_has_the_same_parameters(head):
    config = fields.plain(config_with(epochs=2)["model"]) | {"head": head}
    model = models.create(config)
    whole = {"model": config, "curriculum": {"epochs": 2}, "total_epochs": 2.0}
    made = curriculum.make(fields.settled(whole), model, 4.0)
    for one, other in itertools.pairwise([made.at(0), made.at(4), made.at(99)]):
        trees = [models.abstract_params(model.clone(schedule=x)) for x in (one, other)]
        assert trees[0] == trees[1]


@pytest.mark.parametrize(("settings", "message"), [
    ({"epochs": 3}, "epochs: found 3, expected .* config.total_epochs = 2"),
    ({"epochs": 0.5}, "epochs: found 0.5"),
    ({"epochs": 1, "start": 4}, "start: found 4, expected .* from 0 to .*rate = 3"),
    ({"epochs": 1, "step": 0}, "step: found 0"),
    ({"epochs": 1, "reduction": {"name": "none"}}, "epochs: 1, but the model prunes nothing"),
    ({"epochs": 1, "reduction": {"name": "patchmerger", "fusion": "none"}},
     "parameters of 'patchmerger' are made for one pruning rate"),
])  # fmt: skip
def test_mistakes(settings, message):
    with pytest.raises(ConfigError, match=message):
        recipe.resolve(config_with(**settings))
