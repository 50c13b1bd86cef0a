"""Words for the user: choices, and names that come close."""

import pytest

from cropr_jax.errors import ConfigError
from cropr_jax.host.messages import check_choice, did_you_mean


def test_a_choice_is_given_back():
    assert check_choice("train", "routers", ("all", "routers")) == "routers"
    assert check_choice("model.name", "vit", {"vit": 1, "eva02": 2}) == "vit"
    assert check_choice("fsdp", 2, [1, 2]) == 2


@pytest.mark.parametrize(("value", "found"), [("rooters", "'rooters'"), (None, "None"), (3, "3")])
def test_another_value_names_field_found_and_expected(value, found):
    with pytest.raises(ConfigError) as caught:
        check_choice("train", value, ("all", "routers"))
    assert str(caught.value) == f"config.train: found {found}, expected one of 'all', 'routers'"


@pytest.mark.parametrize(("name", "known", "hint"), [
    ("optimzer", ["optimizer", "model", "mesh"], "did you mean optimizer?"),
    ("eval_evry", ["eval_every", "log_every", "seed"], "did you mean eval_every or log_every?"),
    # Where nothing comes close all are named, in the order of the alphabet.
    ("xyz", {"seed", "model", "data"}, "there are data, model, seed"),
    ("x", [], "there are none below it"),
])  # fmt: skip
def test_hints(name, known, hint):
    assert did_you_mean(name, known) == hint


def test_at_most_three_names_come_close():
    hint = did_you_mean("block", [f"block{i}" for i in range(9)])
    assert hint.count(" or ") == 2
