"""EVA-02 against timm, from its key names to its logits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import fixture_names, load_fixture

from cropr_jax import models
from cropr_jax.convert.timm import from_state_dict, params_from_state_dict
from cropr_jax.core.layers import rope_angles
from cropr_jax.errors import ConfigError

pytestmark = pytest.mark.parity
TOKENS = 1e-4
LOGITS = 2e-5
ROPE = 1e-6
# Relatives of EVA-02 whose weights must not be loaded into it, and what the message says.
REFUSED = {
    "timm_eva02_attn_inner_ln": "'blocks.0.attn.norm.weight' shows an EVA-02-CLIP tower",
    "timm_eva01_layerscale": "'blocks.0.gamma_1' beside an MLP that is not gated shows an EVA-01",
}
NAMES = [name for name in fixture_names("timm_eva0") if name not in REFUSED]


def weights(arrays):
    return {k.removeprefix("w/"): v for k, v in arrays.items() if k.startswith("w/")}


def build(meta):
    kwargs = meta["config"]["kwargs"]
    assert kwargs["swiglu_mlp"] and kwargs["use_rot_pos_emb"]
    return models.create(
        {
            "name": "eva02",
            "image_size": kwargs["img_size"],
            "patch": kwargs["patch_size"],
            "width": kwargs["embed_dim"],
            "depth": kwargs["depth"],
            "heads": kwargs["num_heads"],
            "num_classes": kwargs["num_classes"],
            "mlp": "swiglu_norm" if kwargs["scale_mlp"] else "swiglu",
            "mlp_ratio": kwargs["mlp_ratio"],
            "rope_reference": kwargs["ref_feat_shape"],
            "layer_scale": kwargs.get("init_values"),
            "pool": {"avg": "mean_patches", "token": "cls"}[kwargs["global_pool"]],
        }
    )


@pytest.mark.parametrize("name", NAMES)
def test_backbone(name):
    arrays, meta = load_fixture(name)
    model = build(meta)
    params = params_from_state_dict(weights(arrays), model)
    images = jnp.asarray(arrays["in/x"].transpose(0, 2, 3, 1))
    logits, out = jax.jit(lambda p, x: model.apply({"params": p}, x))(params, images)

    np.testing.assert_allclose(logits, arrays["out/logits"], atol=LOGITS)
    np.testing.assert_allclose(out["pre_logits"], arrays["out/pre_logits"], atol=LOGITS)
    patches = (out["embedded"] - params["pos_embed"])[:, model.prefix :]
    np.testing.assert_allclose(patches, arrays["out/patch_embed"], atol=TOKENS)
    blocks = [key for key in arrays if re.fullmatch(r"out/block\.\d+", key)]
    assert len(blocks) == model.depth
    for block, features in enumerate(out["features"]):
        np.testing.assert_allclose(
            features, arrays[f"out/block.{block}"], atol=TOKENS, err_msg=f"block {block}"
        )


@pytest.mark.parametrize("name", NAMES)
def test_rope_table(name):
    arrays, meta = load_fixture(name)
    model = build(meta)
    rows, columns = np.indices(model.grid)
    coordinates = jnp.asarray(np.stack([rows, columns], -1).reshape(1, -1, 2), jnp.float32)
    angles = rope_angles(coordinates, model.grid, model.rope_reference, model.width // model.heads)
    pairs = np.repeat(np.asarray(angles[0]), 2, axis=-1)
    table = np.concatenate([np.sin(pairs), np.cos(pairs)], axis=-1)
    np.testing.assert_allclose(table, arrays["out/rope"], atol=ROPE)


@pytest.mark.parametrize("name", REFUSED)
def test_relatives_are_refused_by_name(name):
    arrays, meta = load_fixture(name)
    with pytest.raises(ConfigError, match=re.escape(REFUSED[name])):
        from_state_dict(weights(arrays), meta["config"]["kwargs"]["num_heads"])
