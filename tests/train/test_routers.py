"""Routers after the fact: what stays frozen, and which models cannot be trained so."""

import re

import pytest

from cropr_jax import models
from cropr_jax.core import trees
from cropr_jax.errors import ConfigError
from cropr_jax.reducers.registry import REDUCERS
from cropr_jax.train import optimizer, routers

FIELDS = {"width": 8, "depth": 3, "heads": 2, "patch": 4, "image_size": 16, "num_classes": 3}


def build(name="cropr", options=None, **fields):
    reduction = {"name": name, "rate": 2, "fusion": "none", "options": options or {}}
    return models.create(FIELDS | {"reduction": reduction} | fields)


def config(**changes):
    base = {"train": "routers", "targets": "labels", "init": "runs/whole", "optimizer": {}}
    return base | changes


def test_what_is_asked_for():
    assert routers.only(config()) and not routers.only(config(train="all"))
    assert routers.from_model(config(targets="model")) and not routers.from_model(config())
    # The benchmark's configs may have neither field.
    assert not routers.only({}) and not routers.from_model({})


def test_everything_but_the_sites_is_frozen():
    names = list(trees.flatten(models.abstract_params(build(layer_scale=0.1, pool="cls"))))
    trained = optimizer.trainable(names, routers.freeze(config()))
    assert set(trained) == {name for name in names if name.startswith("reducer_")}
    assert {name.split("/")[0] for name in trained} == {"reducer_0", "reducer_1"}
    assert optimizer.trainable(names, routers.freeze(config(train="all"))) == tuple(names)


def test_what_the_config_freezes_stays_frozen():
    own = {"freeze": ["reducer_0/.*"]}
    names = ["cls", "reducer_0/scorer/queries", "reducer_1/scorer/queries"]
    frozen = routers.freeze(config(optimizer=own))
    assert list(optimizer.trainable(names, frozen)) == ["reducer_1/scorer/queries"]
    assert routers.freeze(config(train="all", optimizer=own)) == ("reducer_0/.*",)


ALONE = "cropr can be trained so"
REFUSED = {
    "none": "has no sites",
    "random": "has nothing to train: evaluate it in that model as it is",
    "dynamicvit": "learns from what later blocks make of its tokens",
    "sit": "learns from what later blocks make of its tokens",
}


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_cannot_be_trained_alone(name):
    message = f"config.train: 'routers', but {name!r} {REFUSED[name]}"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}.*{ALONE}$"):
        routers.check(config(), build(name))


@pytest.mark.parametrize("name", ["none", *sorted(REDUCERS)])
def test_a_method_with_losses_of_its_sites_can_be_trained_alone(name):
    model = build(name)
    if name != "none" and model.make_reducer().trains_alone:
        routers.check(config(), model)
        routers.check(config(targets="model"), model)
    else:
        with pytest.raises(ConfigError, match=f"^config.train: 'routers', but {name!r} "):
            routers.check(config(), model)
    routers.check(config(train="all"), model)


@pytest.mark.parametrize(("changes", "message"), [
    ({"train": "all", "targets": "model"}, "config.targets: 'model' are the predictions of a"),
    ({"init": ""}, "config.init: empty, but train='routers' keeps backbone and head as they are"),
])  # fmt: skip
def test_wrong_fields(changes, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        routers.check(config(**changes), build())


@pytest.mark.parametrize("rates", [(0.1, 0.0), (0.0, 0.2)])
def test_a_frozen_backbone_drops_nothing(rates):
    model = build(drop_path=rates[0], drop_path_last_block=rates[1])
    message = f"config.model.drop_path: {rates[0]}, last block {rates[1]}, but a frozen backbone"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}.*set both to 0$"):
        routers.check(config(), model)
