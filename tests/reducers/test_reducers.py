"""Every registered reducer goes through the same battery; then what is particular to each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params

from cropr_jax import models, rng
from cropr_jax.errors import ConfigError
from cropr_jax.layers import Attention, cls_row, col_mean
from cropr_jax.reducers.registry import REDUCERS
from cropr_jax.reducers.variance import pixel_variance

NAMES = sorted(REDUCERS)
DEPTH, PATCHES, RATE = 4, 16, 3
BASE = {"width": 16, "depth": DEPTH, "heads": 2, "patch": 4, "image_size": 16, "num_classes": 5}


def build(name, fusion="none", options=None, **fields):
    reduction = {"name": name, "rate": RATE, "fusion": fusion, "options": options or {}}
    return models.create(BASE | {"reduction": reduction} | fields)


def batch(count=3, size=16):
    images = jax.random.normal(jax.random.key(1), (count, size, size, 3))
    return images, rng.example_keys(jax.random.key(2), 0, jnp.arange(count))


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, images, keys):
    return model.apply({"params": params}, images, keys=keys)


@pytest.mark.parametrize("fusion", ["llf", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_partition_counts_and_cls(name, fusion):
    model = build(name, fusion)
    params = random_params(model)
    images, keys = batch()
    logits, out = forward(model, params, images, keys)
    assert logits.shape == (3, 5) and logits.dtype == jnp.float32

    left = model.schedule.patches(PATCHES)
    assert tuple(kept.shape[1] for kept in out["kept"]) == left
    index = np.concatenate([out["kept"][-1], *out["pruned"]], axis=1)
    np.testing.assert_array_equal(np.sort(index, axis=1), np.tile(np.arange(PATCHES), (3, 1)))
    expected = (*(1 + m for m in (PATCHES, *left)), 1 + (PATCHES if fusion == "llf" else left[-1]))
    counts = tuple(features.shape[1] for features in out["features"])
    assert counts == (expected[: DEPTH - 1] + expected[-1:])
    assert set(np.unique(out["pruned_after"])) == {0, *model.schedule.blocks}


@pytest.mark.parametrize("name", NAMES)
def test_jit_equals_eager_and_batches_are_independent(name):
    model = build(name, "llf")
    params = random_params(model)
    images, keys = batch()
    logits, out = forward(model, params, images, keys)
    eager, eager_out = model.apply({"params": params}, images, keys=keys)
    np.testing.assert_allclose(eager, logits, atol=1e-5)
    one, one_out = forward(model, params, images[1:2], keys[1:2])
    np.testing.assert_allclose(one, logits[1:2], atol=1e-5)
    for site, kept in enumerate(out["kept"]):
        np.testing.assert_array_equal(eager_out["kept"][site], kept)
        np.testing.assert_array_equal(one_out["kept"][site], kept[1:2])


@pytest.mark.parametrize("name", NAMES)
def test_rate_zero_is_the_unpruned_model(name):
    model = build(name, "llf", drop_path=0.0)
    model = model.clone(schedule=type(model.schedule)(DEPTH, ((1, 0), (2, 0))))
    params = random_params(model)
    images, keys = batch()
    pool = "mean_all"
    unpruned = models.create(BASE | {"pool": pool})
    plain = {k: v for k, v in params.items() if not k.startswith("reducer_")}
    expected, _ = forward(unpruned, plain, images, keys)
    found, _ = forward(model, params, images, keys)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_finite_and_gradients_too(name):
    model = build(name, "llf", dtype="bfloat16", drop_path=0.2)
    params = random_params(model)
    images, keys = batch()
    images = images.at[0].set(0.5)  # constant: variances and gradients of norms at their edge

    def loss(params):
        logits, out = model.apply({"params": params}, images, train=True, keys=keys)
        return (logits**2).mean() + sum((aux**2).mean() for aux in out["auxiliary"])

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    assert jnp.isfinite(value)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", NAMES)
def test_slim_form_keeps_logits_and_sets(name):
    model = build(name, "llf")
    params = random_params(model)
    images, keys = batch()
    logits, out = forward(model, params, images, keys)
    slim, slim_params = models.slim(model, params)
    found, slim_out = forward(slim, slim_params, images, keys)
    np.testing.assert_allclose(found, logits, atol=1e-5)
    for site, kept in enumerate(out["kept"]):
        np.testing.assert_array_equal(slim_out["kept"][site], kept)
    assert jax.tree.structure(slim_params) == jax.tree.structure(models.abstract_params(slim))
    assert models.count(slim_params) <= models.count(params)


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("name", ["cropr", "attn_topk"])
def test_any_number_of_prefix_tokens_and_a_rectangle(name, prefix):
    options = {"source": "col_mean"} if name == "attn_topk" else {}
    model = build(name, "llf", options, prefix=prefix, image_size=(16, 24))
    params = random_params(model)
    images = jax.random.normal(jax.random.key(1), (2, 16, 24, 3))
    _, out = forward(model, params, images, None)
    removed = RATE * 2 + prefix
    assert out["kept"][-1].shape == (2, 24 - removed)
    assert out["pruned_after"].shape == (2, 4, 6)


def test_methods_choose_differently():
    images, keys = batch()
    sets = {}
    for name in NAMES:
        model = build(name)
        params = random_params(model)
        sets[name] = np.sort(forward(model, params, images, keys)[1]["kept"][0]).tobytes()
    assert len(set(sets.values())) == len(NAMES)


def test_random_follows_the_example_not_the_batch():
    model = build("random")
    params = random_params(model)
    images, keys = batch()
    _, first = forward(model, params, images, keys)
    _, again = forward(model, params, images[::-1], keys[::-1])
    np.testing.assert_array_equal(first["kept"][0], again["kept"][0][::-1])
    other = rng.example_keys(jax.random.key(2), 1, jnp.arange(3))
    _, later = forward(model, params, images, other)
    assert (np.asarray(first["kept"][0]) != np.asarray(later["kept"][0])).any()
    with pytest.raises(ValueError, match="draws at random"):
        model.apply({"params": params}, images)


def test_random_keeps_every_patch_equally_often():
    keys = rng.example_keys(jax.random.key(0), 0, jnp.arange(4000))
    module = REDUCERS["random"]()
    from cropr_jax.reducers import Context
    from cropr_jax.tokens import from_features

    tokens = from_features(jnp.zeros((4000, 8, 1)), (2, 4), 0)
    kept, _, _ = module.apply({}, tokens, Context(keys=keys), keep=2, train=False)
    share = np.bincount(np.asarray(kept.index).ravel(), minlength=8) / 4000
    np.testing.assert_allclose(share, 2 / 8, atol=5 * np.sqrt(0.25 * 0.75 / 4000))


def test_variance_by_brute_force():
    pixels = np.random.default_rng(0).normal(size=(2, 5, 12)).astype(np.float32)
    expected = [
        [np.mean([patch[channel::3].var() for channel in range(3)]) for patch in image]
        for image in pixels
    ]
    np.testing.assert_allclose(pixel_variance(jnp.asarray(pixels)), expected, rtol=1e-5)
    flat = jnp.broadcast_to(jnp.array([0.3, 0.1, 0.9] * 4), (1, 1, 12))
    np.testing.assert_allclose(pixel_variance(flat), 0, atol=1e-12)


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


def test_cls_row_is_the_first_row_of_the_attention_matrix():
    query, key = jax.random.normal(jax.random.key(0), (2, 2, 70, 3, 8))
    logits = jnp.einsum("bshk,bthk->bhst", query, key) * 8**-0.5
    matrix = jax.nn.softmax(logits, axis=-1)
    np.testing.assert_allclose(cls_row(query, key), matrix[:, :, 0], atol=1e-6)
    np.testing.assert_allclose(col_mean(query, key, 1), matrix[:, :, 1:].mean((1, 2)), atol=1e-6)
    np.testing.assert_allclose(col_mean(query, key, 0).sum(1), 1, atol=1e-5)


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
    with pytest.raises(ConfigError, match="unexpected keyword argument 'colour'"):
        build("cropr", options={"colour": 1})
    with pytest.raises(ConfigError, match="not a multiple of the patch"):
        build("cropr", image_size=(18, 16))
    model = build("cropr")
    params = random_params(model)
    with pytest.raises(ValueError, match="images are 24 x 16 but the model was built for 16 x 16"):
        model.apply({"params": params}, jnp.zeros((1, 24, 16, 3)))
