"""What is particular to the simplest methods, to what blocks compute for a site, and refusals.

What all methods share is in test_battery.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params

from cropr_jax import models
from cropr_jax.core import rng
from cropr_jax.core.attention import Attention, cls_row, col_mean, fold_bias
from cropr_jax.core.reducer import SiteSizes
from cropr_jax.errors import ConfigError
from cropr_jax.reducers import Context
from cropr_jax.reducers.registry import REDUCERS
from cropr_jax.reducers.variance import pixel_variance
from cropr_jax.tokens import MASKED, from_features

DEPTH, RATE = 4, 3
BASE = {"width": 16, "depth": DEPTH, "heads": 2, "patch": 4, "image_size": 16, "num_classes": 5}


def build(name, fusion="none", options=None, **fields):
    reduction = {"name": name, "rate": RATE, "fusion": fusion, "options": options or {}}
    return models.create(BASE | {"reduction": reduction} | fields)


def batch(count=3, size=16, step=0):
    images = np.random.default_rng(1).normal(size=(count, size, size, 3)).astype(np.float32)
    return images, example_keys(2, step, count)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def example_keys(seed, step, count):
    return rng.example_keys(jax.random.key(seed), step, jnp.arange(count))


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, images, keys):
    return model.apply({"params": params}, images, keys=keys)


def forward(model, params, images, keys):
    """Logits and outputs, compiled, on the host."""
    return jax.device_get(apply(model, params, images, keys))


@functools.partial(jax.jit, static_argnums=0, static_argnames="keep")
def site(module, tokens, context, keep):
    """What a site without parameters returns at inference."""
    return module.apply({}, tokens, context, keep=keep, train=False)


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("name", ["cropr", "attn_topk"])
def test_any_number_of_prefix_tokens_and_a_rectangle(name, prefix):
    options = {"source": "col_mean"} if name == "attn_topk" else {}
    model = build(name, "llf", options, prefix=prefix, image_size=(16, 24))
    params = random_params(model)
    images = np.random.default_rng(1).normal(size=(2, 16, 24, 3)).astype(np.float32)
    _, out = forward(model, params, images, None)
    removed = RATE * 2 + prefix
    assert out["kept"][-1].shape == (2, 24 - removed)
    assert out["pruned_after"].shape == (2, 4, 6)


def test_random_follows_the_example_not_the_batch():
    model = build("random")
    params = random_params(model)
    images, keys = batch()
    _, first = forward(model, params, images, keys)
    _, again = forward(model, params, images[::-1], keys[::-1])
    np.testing.assert_array_equal(first["kept"][0], again["kept"][0][::-1])
    _, later = forward(model, params, *batch(step=1))
    assert (first["kept"][0] != later["kept"][0]).any()
    with pytest.raises(ValueError, match="draws at random"):
        forward(model, params, images, None)


def test_random_keeps_every_patch_equally_often():
    tokens = from_features(jnp.zeros((4000, 8, 1)), (2, 4), 0)
    context = Context(keys=example_keys(0, 0, 4000))
    kept, _, _ = site(REDUCERS["random"](), tokens, context, keep=2)
    share = np.bincount(np.asarray(kept.index).ravel(), minlength=8) / 4000
    np.testing.assert_allclose(share, 2 / 8, atol=5 * np.sqrt(0.25 * 0.75 / 4000))


def test_variance_by_brute_force():
    pixels = np.random.default_rng(0).normal(size=(2, 5, 12)).astype(np.float32)
    expected = [
        [np.mean([patch[channel::3].var() for channel in range(3)]) for patch in image]
        for image in pixels
    ]
    variance = jax.jit(pixel_variance)
    np.testing.assert_allclose(variance(pixels), expected, rtol=1e-5)
    flat = np.array([[[0.3, 0.1, 0.9] * 4]], np.float32)
    np.testing.assert_allclose(variance(flat), 0, atol=1e-12)


def test_variance_ranks_by_the_image_alone():
    images, keys = batch()
    model = build("variance")
    _, one = forward(model, random_params(model), images, keys)
    _, two = forward(model, random_params(model, 9), images, keys)
    np.testing.assert_array_equal(one["kept"][-1], two["kept"][-1])


def test_non_salient_and_cropr_partition_the_patches():
    images, keys = batch()
    cropr = build("cropr")
    params = random_params(cropr)
    _, kept = forward(cropr, params, images, keys)
    inverted = build("non_salient")
    _, out = forward(inverted, params, images, keys)
    removed = out["pruned"][0].shape[1]
    np.testing.assert_array_equal(np.sort(out["pruned"][0]), np.sort(kept["kept"][0][:, :removed]))


def test_attn_topk_in_the_middle_of_the_block():
    """As EViT that fuses nothing. Tokens that stay do not see where the others went."""
    images, keys = batch()
    middle = {"placement": "middle"}
    model = build("attn_topk", options=middle)
    params = random_params(model)
    logits, out = forward(model, params, images, keys)
    np.testing.assert_array_equal(
        forward(build("evit", options={"fuse": False}), params, images, keys)[0], logits
    )
    np.testing.assert_allclose(
        forward(build("attn_topk"), params, images, keys)[0], logits, atol=1e-5
    )
    assert model.mlp_inputs()[0] == 1 + out["kept"][0].shape[1]
    # With fusion they come back, without the MLP of that block.
    fused, _ = forward(build("attn_topk", "llf", middle), params, images, keys)
    after, _ = forward(build("attn_topk", "llf"), params, images, keys)
    assert np.abs(fused - after).max() > 1e-3


def test_attn_topk_may_let_all_tokens_vote():
    received = jnp.array([[9.0, 1.0, 3.0, 2.0]])
    tokens = from_features(jnp.zeros((1, 4, 2)), (1, 3), 1)
    module = REDUCERS["attn_topk"](source="col_mean_all")
    context = Context(col_mean_all=received)
    kept, _, _ = site(module, tokens, context, keep=2)
    assert kept.index.tolist() == [[1, 2]]
    assert module.macs(SiteSizes(64, 56, 1, 8, 2)) == (0, 65 * 65 * 8)


def test_cls_row_is_the_first_row_of_the_attention_matrix():
    generator = np.random.default_rng(0)
    query, key = generator.normal(size=(2, 2, 70, 3, 8)).astype(np.float32)
    bias = generator.normal(size=(2, 70)).astype(np.float32)
    row, mean = jax.jit(cls_row), jax.jit(col_mean, static_argnums=2)
    logits = np.einsum("bshk,bthk->bhst", query, key) * 8**-0.5
    matrix = softmax(logits)
    np.testing.assert_allclose(row(query, key), matrix[:, :, 0], atol=1e-6)
    np.testing.assert_allclose(mean(query, key, 1), matrix[:, :, 1:].mean((1, 2)), atol=1e-6)
    np.testing.assert_allclose(mean(query, key, 0).sum(1), 1, atol=1e-5)
    matrix = softmax(logits + bias[:, None, None])
    np.testing.assert_allclose(row(query, key, bias), matrix[:, :, 0], atol=1e-6)
    np.testing.assert_allclose(mean(query, key, 0, bias), matrix.mean((1, 2)), atol=1e-6)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_keys_and_values_of_a_block():
    """Means of the keys before rotation, norms of the values, and no gradient through either."""
    needs = frozenset({"k_mean", "v_norm", "col_mean_all"})
    module = Attention(heads=2, needs=needs, prefix=1)
    x = np.random.default_rng(1).normal(size=(2, 5, 8)).astype(np.float32)
    params = {"params": random_params_of(module, x)}

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def extras(x):
        found = module.apply(params, x, angles=jnp.ones((2, 5, 2)))[1]
        return sum(found[name].sum() for name in ("k_mean", "v_norm")), found

    gradient, found = jax.device_get(extras(x))
    project = params["params"]
    key, value = (
        np.einsum("btd,dhk->bthk", x, project[name]["kernel"]) + project[name]["bias"]
        for name in ("key", "value")
    )
    np.testing.assert_allclose(found["k_mean"], key.mean(2), atol=1e-5)
    norm = np.linalg.norm(value, axis=-1).transpose(0, 2, 1)
    np.testing.assert_allclose(found["v_norm"], norm, atol=1e-5)
    assert found.keys() == needs and (gradient == 0).all()


def random_params_of(module, x):
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    draw = np.random.default_rng(0).normal
    return jax.tree.map(lambda leaf: draw(size=leaf.shape).astype(leaf.dtype), shapes)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-4)])
def test_a_bias_on_keys_folded_into_channels(dtype, tolerance):
    """Logits of the wider heads at the scale of the narrow ones are those with the bias."""
    generator = np.random.default_rng(0)
    query, key, value = generator.normal(size=(3, 2, 5, 2, 8)).astype(jnp.dtype(dtype))
    bias = np.log(generator.uniform(1.0, 40.0, size=(2, 5)).astype(np.float32))
    bias[:, 3] = MASKED
    wide = [np.asarray(x, np.float32) for x in jax.jit(fold_bias)(query, key, value, bias)]
    narrow = [x.astype(np.float32) for x in (query, key, value)]
    assert all(x.shape == (2, 5, 2, 16) for x in wide)
    found, plain = (np.einsum("bthk,bshk->bhts", *heads[:2]) * 8**-0.5 for heads in (wide, narrow))
    np.testing.assert_allclose(found, plain + bias[:, None, None], rtol=1e-5, atol=tolerance)
    np.testing.assert_array_equal(wide[2][..., :8], narrow[2])
    assert (wide[2][..., 8:] == 0).all()


def test_needs_cost_no_attention_matrix():
    module = Attention(heads=2, needs=frozenset({"cls_row"}))
    x = jnp.zeros((1, 300, 8))
    text = jax.jit(module.init_with_output).lower(jax.random.key(0), x).as_text()
    # One matrix of 300 x 300, that of the attention itself; the CLS row is 1 x 300.
    rows = [line for line in text.splitlines() if "dot_general" in line and "300x300" in line]
    assert len(rows) <= 2


def test_impossible_models_say_so():
    with pytest.raises(ConfigError, match="needs a CLS token"):
        build("attn_topk", prefix=0, pool="mean_patches")
    with pytest.raises(ConfigError, match="needs a CLS token"):
        build("cropr", prefix=0, pool="cls")
    with pytest.raises(ConfigError, match="model.reduction.name: found 'crop'"):
        build("crop")
    with pytest.raises(ConfigError, match="source: found 'rows'"):
        build("attn_topk", options={"source": "rows"})
    with pytest.raises(ConfigError, match="placement: found 'before'"):
        build("attn_topk", options={"placement": "before"})
    with pytest.raises(ConfigError, match="options.colour: no such field"):
        build("cropr", options={"colour": 1})
    with pytest.raises(ConfigError, match="not a multiple of the patch"):
        build("cropr", image_size=(18, 16))
    model = build("cropr")
    params = random_params(model)
    with pytest.raises(ValueError, match="images are 24 x 16 but the model was built for 16 x 16"):
        model.apply({"params": params}, jnp.zeros((1, 24, 16, 3)))
