"""The Segmenter, pruned and not, against the authors' code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import fixture_names, load_fixture
from flax import traverse_util

from cropr_jax import models
from cropr_jax.convert.timm import from_state_dict, params_from_state_dict
from cropr_jax.core.layers import rope_angles, upsample
from cropr_jax.core.schedule import Schedule

pytestmark = pytest.mark.parity
TOKENS = 1e-4
SCORES = 5e-4
GRADIENTS = 1e-5
LOSSES = 1e-5
CONFIGS = {name: load_fixture(name)[1].get("config", {}) for name in fixture_names("segm_")}
NAMES = [name for name, config in CONFIGS.items() if "Segmenter" in config.get("cls", "")]
# (fixture, stage of the curriculum, its rate); the stage '' is the full rate.
CASES = [(name, "", None) for name in NAMES] + [
    (name, f"{stage}/", rate)
    for name in NAMES
    for stage, rate in CONFIGS[name].get("epoch_outputs", {}).items()
]


def weights(arrays, prefix="w/"):
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def channels_last(x):
    return x.transpose(0, 2, 3, 1)


def build(meta):
    kwargs, cropr = meta["config"]["kwargs"], meta["config"]["cropr_cfg"]
    assert kwargs["swiglu_mlp"] and kwargs["use_rot_pos_emb"]
    reduction = {"name": "none"}
    if cropr["use_cropr"]:
        assert cropr["q_proj"] == cropr["k_proj"] == cropr["v_proj"]
        reduction = {
            "name": "cropr",
            "rate": cropr["pruning_rate"],
            "fusion": "llf",
            "options": {
                "heads": cropr["num_heads"],
                "projections": cropr["k_proj"],
                "pre_norm": cropr["pre_attn_norm"],
                "mlp": cropr["mlp"],
            },
        }
    return models.create(
        {
            "name": "eva02",
            "head": "segmentation",
            "image_size": kwargs["img_size"],
            "patch": kwargs["patch_size"],
            "width": kwargs["embed_dim"],
            "depth": kwargs["depth"],
            "heads": kwargs["num_heads"],
            "num_classes": kwargs["num_classes"],
            "mlp": "swiglu_norm" if kwargs["scale_mlp"] else "swiglu",
            "mlp_ratio": kwargs["mlp_ratio"],
            "rope_reference": kwargs["ref_feat_shape"],
            "reduction": reduction,
        }
    )


def at_rate(model, rate):
    """The model under another rate. The released code's first site removes one more even at 0."""
    sites = [(block, rate + (site == 0)) for site, block in enumerate(model.schedule.blocks)]
    return model.clone(schedule=Schedule(model.depth, tuple(sites)))


def cross_entropy(logits, labels, ignore):
    """Mean over the labels that are not to be ignored."""
    valid = labels != ignore
    picked = jnp.take_along_axis(
        jax.nn.log_softmax(logits), jnp.where(valid, labels, 0)[..., None], axis=-1
    )[..., 0]
    return -jnp.where(valid, picked, 0).sum() / valid.sum()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage", "rate"), CASES)
def test_training_outputs_and_gradients(name, stage, rate):
    arrays, meta = load_fixture(name)
    model = build(meta)
    params = params_from_state_dict(weights(arrays), model)
    if rate is not None:
        model = at_rate(model, rate)
    labels = arrays["in/labels"]
    small = labels[:, :: model.patch[0], :: model.patch[1]]
    ignore = meta["config"]["ignore_label"]

    def loss(params, images):
        logits, out = model.apply({"params": params}, images, train=True)
        main = cross_entropy(upsample(logits, labels.shape[1:]), labels, ignore)
        extra = model.reducer_losses(
            out, lambda x, places: cross_entropy(x, small.reshape(len(small), -1), ignore)
        )
        return main + sum(extra.values()), (out, jnp.stack([main, *extra.values()]))

    # Gradients are kept for the full rate, and not where variances are small.
    reference = weights(arrays, f"out/{stage}grad/")
    compute = jax.value_and_grad(loss, has_aux=True) if reference else lambda *of: (loss(*of), {})
    found = jax.device_get(jax.jit(compute)(params, channels_last(arrays["in/x"])))
    (value, (out, every)), gradients = found
    prefix = f"out/{stage}train"
    np.testing.assert_allclose(every, arrays[f"{prefix}/losses"], atol=LOSSES)
    np.testing.assert_allclose(value, arrays[f"{prefix}/loss"].reshape(()), rtol=LOSSES)
    if "out/train/labels_down" in arrays:
        np.testing.assert_array_equal(small, arrays["out/train/labels_down"])
    assert len(out["auxiliary"]) == sum(key.startswith(f"{prefix}/aux.") for key in arrays)
    for site, auxiliary in enumerate(out["auxiliary"]):
        expected = channels_last(arrays[f"{prefix}/aux.{site}"])
        np.testing.assert_allclose(auxiliary.reshape(expected.shape), expected, atol=TOKENS)
    check_routing(out, arrays, prefix)

    expected = traverse_util.flatten_dict(from_state_dict(reference, model.heads), sep="/")
    found = traverse_util.flatten_dict(gradients, sep="/")
    assert found.keys() == expected.keys()
    for leaf, gradient in expected.items():
        np.testing.assert_allclose(found[leaf], gradient, atol=GRADIENTS, err_msg=leaf)


def check_routing(out, arrays, prefix):
    """Kept and pruned sets in order, exactly; scores; the order in the last block."""
    for site, result in enumerate(out["sites"]):
        scores = arrays[f"{prefix}/scores.{site}"][:, 1:]
        np.testing.assert_allclose(result["scores"], scores, atol=SCORES)
        kept = arrays[f"{prefix}/kept_idx.{site}"]
        assert (kept[:, 0] == 0).all()
        np.testing.assert_array_equal(out["kept"][site] + 1, kept[:, 1:])
        if f"{prefix}/pruned_idx.{site}" in arrays:
            pruned = arrays[f"{prefix}/pruned_idx.{site}"]
            np.testing.assert_array_equal(out["pruned"][site] + 1, pruned)
    if out["sites"]:
        order = np.concatenate([out["kept"][-1], *out["pruned"]], axis=1) + 1
        np.testing.assert_array_equal(order, arrays[f"{prefix}/llf_idx"][:, 1:])


@pytest.mark.parametrize(("name", "stage", "rate"), CASES)
def test_slim_inference(name, stage, rate):
    arrays, meta = load_fixture(name)
    model = build(meta)
    full = params_from_state_dict(weights(arrays), model)
    if rate is not None:
        model = at_rate(model, rate)
    slim, params = models.slim(model, full)

    @jax.jit
    def forward(params, images):
        logits, out = slim.apply({"params": params}, images)
        return logits, out, upsample(logits, model.image_size)

    logits, out, enlarged = jax.device_get(forward(params, channels_last(arrays["in/x"])))

    prefix = f"out/{stage}eval"
    expected = arrays[f"{prefix}/token_logits"]
    np.testing.assert_allclose(logits.reshape(expected.shape), expected, atol=TOKENS)
    if stage:
        return
    check_routing(out, arrays, prefix)
    masks = channels_last(arrays[f"{prefix}/masks"])
    np.testing.assert_allclose(enlarged, masks, atol=TOKENS)
    for block, features in enumerate(out["features"]):
        np.testing.assert_allclose(features, arrays[f"{prefix}/block.{block}"], atol=TOKENS)

    odd, masks = channels_last(arrays["in/x_odd"]), channels_last(arrays[f"{prefix}/masks_odd"])
    height, width = odd.shape[1:3]
    more = model.image_size[0] - height, model.image_size[1] - width
    *_, enlarged = forward(params, np.pad(odd, ((0, 0), (0, more[0]), (0, more[1]), (0, 0))))
    np.testing.assert_allclose(np.asarray(enlarged)[:, :height, :width], masks, atol=TOKENS)


@pytest.mark.parametrize("name", NAMES)
def test_rope_table(name):
    arrays, meta = load_fixture(name)
    model = build(meta)
    rows, columns = np.indices(model.grid)
    coordinates = np.stack([rows, columns], -1).reshape(1, -1, 2).astype(np.float32)
    compute = jax.jit(rope_angles, static_argnums=(1, 2, 3))
    angles = compute(coordinates, model.grid, model.rope_reference, model.width // model.heads)
    pairs = np.repeat(np.asarray(angles[0]), 2, axis=-1)
    table = np.concatenate([np.sin(pairs), np.cos(pairs)], axis=-1)
    np.testing.assert_allclose(table, arrays["out/eval/rope"], atol=1e-6)
