"""Out to timm's names: the inverse of coming in, and what timm's models call theirs."""

import numpy as np
import pytest
from conftest import DATA, fixture_names, load_fixture
from flax import traverse_util
from state_dicts import CROPR, EVA02, VIT, made

from cropr_jax import models
from cropr_jax.convert.load import load
from cropr_jax.convert.timm import from_state_dict
from cropr_jax.convert.to_timm import rename, to_timm
from cropr_jax.errors import ConfigError


def nested(flat):
    return traverse_util.unflatten_dict(flat, sep="/")


@pytest.mark.parity
@pytest.mark.parametrize(
    "name", [*fixture_names("timm_vit"), *fixture_names("timm_eva02"), *fixture_names("vit_unp")]
)
def test_state_dicts_of_timm_come_back(name):
    """Names, shapes and values are those that timm's own models had."""
    arrays, meta = load_fixture(name)
    state = {k.removeprefix("w/"): v for k, v in arrays.items() if k.startswith("w/")}
    if any(".attn.norm." in key for key in state):
        with pytest.raises(ConfigError, match="EVA-02-CLIP"):
            from_state_dict(state, meta["config"]["kwargs"]["num_heads"])
        return
    params = from_state_dict(state, meta["config"]["kwargs"]["num_heads"])
    found = rename(traverse_util.flatten_dict(params, sep="/"))
    assert found.keys() == state.keys()
    for key, value in state.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)


@pytest.mark.parametrize("fields", [VIT, EVA02, EVA02 | {"mlp": "swiglu", "layer_scale": 0.1}])
def test_there_and_back(fields):
    model, flat = made(fields | {"prefix": 3})
    state = to_timm(nested(flat), model)
    assert state["cls_token"].shape == (1, 1, 16) and state["reg_token"].shape == (1, 2, 16)
    state["cls_token"] = np.concatenate([state["cls_token"], state.pop("reg_token")], axis=1)
    back = traverse_util.flatten_dict(from_state_dict(state, 2), sep="/")
    assert back.keys() == flat.keys()
    for name, value in flat.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)


@pytest.mark.parametrize("fields", [VIT | CROPR, EVA02 | CROPR])
def test_slim_models_give_the_backbone(fields):
    model, flat = made(fields)
    slim, slim_params = models.slim(model, nested(flat))
    found = to_timm(slim_params, slim)
    assert found.keys() == to_timm(nested(flat), model).keys()
    assert not any("reducer" in name or "cropr" in name for name in found)


def test_what_is_no_whole_model():
    model, flat = made(VIT)
    key = flat.pop("block_1/attn/key/kernel")
    with pytest.raises(ConfigError, match="block_1/attn/key/kernel is missing"):
        to_timm(nested(flat), model)
    with pytest.raises(ConfigError, match="'block_1/attn/key/kernel' is missing; timm keeps it"):
        rename(flat)
    with pytest.raises(ConfigError, match="'neck/kernel' is no parameter"):
        rename(flat | {"block_1/attn/key/kernel": key, "neck/kernel": key})


@pytest.mark.real_data
def test_real_weights_come_back_bit_equal():
    path = DATA / "weights" / "vit_tiny_patch16_224.npz"
    model = models.create({"variant": "ti", "image_size": 224, "num_classes": 1000, "pool": "cls"})
    loaded = load(str(path), model)
    assert loaded.notes() == []
    state = to_timm(nested(loaded.params), model)
    with np.load(path) as stored:
        assert set(stored) == set(state)
        for name, value in stored.items():
            np.testing.assert_array_equal(state[name].view(np.int32), value.view(np.int32))
    again = traverse_util.flatten_dict(from_state_dict(state, model.heads), sep="/")
    for name, value in loaded.params.items():
        np.testing.assert_array_equal(again[name].view(np.int32), value.view(np.int32))
