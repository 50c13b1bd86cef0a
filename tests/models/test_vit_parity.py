"""The ViT, pruned and not, against the authors' code and timm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import fixture_names, load_fixture
from flax import traverse_util

from cropr_jax import models
from cropr_jax.convert.timm import from_state_dict, params_from_state_dict

pytestmark = pytest.mark.parity
TOKENS = 5e-5
GRADIENTS = 1e-5
LOSSES = 1e-5
POOLS = {"avg": "mean_all", "token": "cls"}


def weights(arrays, prefix="w/"):
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def images_of(arrays):
    return jnp.asarray(arrays["in/x"].transpose(0, 2, 3, 1))


def forward(model, params, images):
    return jax.device_get(jax.jit(lambda p, x: model.apply({"params": p}, x))(params, images))


def reduction_of(cropr):
    if not cropr["use_cropr"]:
        return {"name": "none"}
    return {
        "name": "cropr",
        "rate": cropr["pruning_rate"],
        "fusion": "llf" if cropr["llf"] else "none",
        "options": {
            "heads": cropr["num_heads"],
            "projections": cropr["k_proj"],
            "pre_norm": cropr["pre_attn_norm"],
            "mlp": cropr["mlp"],
        },
    }


def build(meta):
    """The authors' model; its blocks have an MLP of ratio 4 whatever was asked for."""
    kwargs = meta["config"]["kwargs"]
    return models.create(
        {
            "image_size": kwargs["img_size"],
            "patch": kwargs["patch_size"],
            "width": kwargs["embed_dim"],
            "depth": kwargs["depth"],
            "heads": kwargs["num_heads"],
            "num_classes": kwargs["num_classes"],
            "pool": POOLS[kwargs["global_pool"]],
            "reduction": reduction_of(meta["config"]["cropr_cfg"]),
        }
    )


def cross_entropy(logits, targets):
    return -(targets * jax.nn.log_softmax(logits)).sum(-1).mean()


@pytest.mark.parametrize("name", fixture_names("vit_"))
def test_training_outputs_and_gradients(name):
    arrays, meta = load_fixture(name)
    model = build(meta)
    params = params_from_state_dict(weights(arrays), model)
    hard = np.eye(model.num_classes, dtype=np.float32)[arrays["in/labels"]]
    targets = hard, arrays["in/soft_labels"], 0.9 * hard + 0.1 / model.num_classes

    def losses(logits, out, targets):
        heads = [logits, *(auxiliary[:, 0] for auxiliary in out["auxiliary"])]
        return jnp.stack([cross_entropy(head, targets) for head in heads])

    def loss(params, images):
        logits, out = model.apply({"params": params}, images, train=True)
        every, *others = [losses(logits, out, target) for target in targets]
        return every.sum(), (logits, out, every, *others)

    # The small-variance cases store outputs only.
    reference = weights(arrays, "out/grad/")
    compute = jax.value_and_grad(loss, has_aux=True) if reference else lambda *of: (loss(*of), {})
    found = jax.device_get(jax.jit(compute)(params, images_of(arrays)))
    (value, (logits, out, every, soft, smooth)), gradients = found
    np.testing.assert_allclose(logits, arrays["out/train/logits"], atol=TOKENS)
    np.testing.assert_allclose(every, arrays["out/train/losses"], atol=LOSSES)
    np.testing.assert_allclose(value, arrays["out/train/loss"].reshape(()), rtol=LOSSES)
    np.testing.assert_allclose(soft, arrays["out/train/losses_soft"], atol=LOSSES)
    np.testing.assert_allclose(smooth, arrays["out/train/losses_smooth0.1"], atol=LOSSES)
    for site, auxiliary in enumerate(out["auxiliary"]):
        np.testing.assert_allclose(auxiliary[:, 0], arrays[f"out/train/aux.{site}"], atol=TOKENS)
    assert len(out["auxiliary"]) == sum(key.startswith("out/train/aux.") for key in arrays)
    check_routing(out, arrays, "train")

    expected = traverse_util.flatten_dict(from_state_dict(reference, model.heads), sep="/")
    found = traverse_util.flatten_dict(gradients, sep="/")
    assert found.keys() == expected.keys()
    for leaf, gradient in expected.items():
        if not leaf.endswith("attn/key/bias"):  # zero in exact arithmetic
            np.testing.assert_allclose(found[leaf], gradient, atol=GRADIENTS, err_msg=leaf)


def check_routing(out, arrays, mode):
    """Kept and pruned sets in order, exactly; scores; the order in the last block."""
    for site, result in enumerate(out["sites"]):
        np.testing.assert_allclose(
            result["scores"], arrays[f"out/{mode}/scores.{site}"][:, 1:], atol=TOKENS
        )
        kept = arrays[f"out/{mode}/kept_idx.{site}"]
        assert (kept[:, 0] == 0).all()
        np.testing.assert_array_equal(out["kept"][site] + 1, kept[:, 1:])
        np.testing.assert_array_equal(
            out["pruned"][site] + 1, arrays[f"out/{mode}/pruned_idx.{site}"]
        )
    if f"out/{mode}/llf_idx" in arrays:
        order = np.concatenate([out["kept"][-1], *out["pruned"]], axis=1) + 1
        np.testing.assert_array_equal(order, arrays[f"out/{mode}/llf_idx"][:, 1:])


@pytest.mark.parametrize("name", fixture_names("vit_"))
def test_slim_inference(name):
    arrays, meta = load_fixture(name)
    model = build(meta)
    full = params_from_state_dict(weights(arrays), model)
    slim, params = models.slim(model, full)
    logits, out = forward(slim, params, images_of(arrays))

    np.testing.assert_allclose(logits, arrays["out/eval/logits"], atol=TOKENS)
    np.testing.assert_allclose(out["embedded"], arrays["out/eval/embed"], atol=TOKENS)
    stored = [key for key in arrays if key.startswith("out/eval/block.")]
    for key in stored:
        block = int(key.rpartition(".")[2])
        np.testing.assert_allclose(out["features"][block], arrays[key], atol=TOKENS, err_msg=key)
    np.testing.assert_allclose(
        out["pooled"], arrays["out/eval/pooled"].reshape(out["pooled"].shape), atol=TOKENS
    )
    np.testing.assert_allclose(out["pre_logits"], arrays["out/eval/fc_norm_out"], atol=TOKENS)
    check_routing(out, arrays, "eval")


@pytest.mark.parametrize("name", fixture_names("timm_vit_"))
def test_timm_backbones(name):
    arrays, meta = load_fixture(name)
    kwargs = meta["config"]["kwargs"]
    model = models.create(
        {
            "image_size": kwargs["img_size"],
            "patch": kwargs["patch_size"],
            "width": kwargs["embed_dim"],
            "depth": kwargs["depth"],
            "heads": kwargs["num_heads"],
            "mlp_ratio": kwargs.get("mlp_ratio", 4.0),
            "num_classes": kwargs["num_classes"],
            "pool": {"avg": "mean_patches", "token": "cls"}[kwargs["global_pool"]],
            "layer_scale": kwargs.get("init_values"),
        }
    )
    params = params_from_state_dict(weights(arrays), model)
    logits, out = forward(model, params, images_of(arrays))
    np.testing.assert_allclose(logits, arrays["out/logits"], atol=2e-5)
    np.testing.assert_allclose(out["pre_logits"], arrays["out/pre_logits"], atol=2e-5)
    for block, features in enumerate(out["features"]):
        np.testing.assert_allclose(
            features, arrays[f"out/block.{block}"], atol=1e-4, err_msg=f"block {block}"
        )
