"""PatchMerger: the reference's numbers, and what its formula promises."""

import functools

import jax
import numpy as np
import pytest
import tokred
from conftest import fixture_names, load_fixture

from cropr_jax.core.reducer import Context
from cropr_jax.reducers.patchmerger import PatchMerger
from cropr_jax.tokens import from_features

KEEP = 3


@jax.jit
def apply(params, x):
    tokens = from_features(x, (2, x.shape[1] // 2), 0)
    return PatchMerger().apply({"params": params}, tokens, Context(), keep=KEEP, train=False)


def merge(x, queries=None):
    """The patch tokens that come out, and the weights."""
    width = x.shape[-1]
    if queries is None:
        queries = normal(1, KEEP, width)
    channel = np.arange(width, dtype=np.float32)
    params = {"queries": queries, "norm": {"scale": 1 + 0.1 * channel, "bias": 0.2 * channel}}
    made, gone, out = jax.device_get(apply(params, x))
    assert gone is None
    return made.x, out["weights"]


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def normed(x):
    width = x.shape[-1]
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return scaled * (1 + 0.1 * np.arange(width)) + 0.2 * np.arange(width)


@pytest.fixture
def x():
    return normal(0, 2, 8, 4)


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("tokred_patchmerger"))
def test_reference(name):
    arrays, meta = load_fixture(name)
    model = tokred.build(meta, "patchmerger", meta["config"]["cluster_count"])

    def convert(weights):
        return {"queries": weights["queries"], "norm": tokred.norm(weights, "norm")}

    params = tokred.params(arrays, meta, "cluster_layers", convert)
    _, out = tokred.run(model, params, arrays)
    for site, block in enumerate(meta["config"]["args"]["reduction_loc"]):
        weights = arrays[f"out/reduce.{site}/out1"]
        np.testing.assert_allclose(out["sites"][site]["weights"], weights, atol=tokred.TOKENS)
        hard = out["sites"][site]["weights"].argmax(1)
        np.testing.assert_array_equal(hard, arrays[f"out/viz.{block}/Assignment_Maps"])


def test_outputs_are_averages_of_the_normed_tokens(x):
    merged, weights = merge(x)
    assert merged.shape == (2, KEEP, 4)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(merged, weights @ normed(x), atol=1e-5)


def test_order_and_affine_changes_of_the_inputs_do_not_matter(x):
    merged, _ = merge(x)
    shuffled, _ = merge(x[:, ::-1])
    np.testing.assert_allclose(shuffled, merged, atol=1e-5)
    scale = 2 + np.arange(8, dtype=np.float32)[None, :, None]
    rescaled, _ = merge(x * scale + 7 * scale)
    np.testing.assert_allclose(rescaled, merged, atol=1e-3)


def test_zero_and_equal_queries(x):
    uniform, weights = merge(x, np.zeros((KEEP, 4), np.float32))
    np.testing.assert_allclose(weights, 1 / 8, atol=1e-6)
    mean = normed(x).mean(1, keepdims=True)
    np.testing.assert_allclose(uniform, np.repeat(mean, KEEP, 1), atol=1e-5)
    equal, _ = merge(x, np.full((KEEP, 4), 0.7, np.float32))
    np.testing.assert_array_equal(equal[:, 0], equal[:, 1])


def test_dividing_by_the_root_of_the_width_keeps_initial_weights_soft():
    x, queries = normal(0, 1, 64, 256), normal(1, 8, 256)
    # Without a norm's weights that differ by channel: those of `merge` blow up the logits.
    norm = {"scale": np.ones(256, np.float32), "bias": np.zeros(256, np.float32)}
    largest = {}
    for scale in ("none", "width"):
        mix = jax.jit(
            functools.partial(PatchMerger(scale=scale).apply, method="mix"), static_argnums=2
        )
        weights, _ = jax.device_get(mix({"params": {"queries": queries, "norm": norm}}, x, 8))
        largest[scale] = float(weights.max(-1).mean())
    assert largest["none"] > 0.8 and largest["width"] < 0.2


def test_init_std(x):
    module = PatchMerger(init_std=0.5)
    init = jax.jit(functools.partial(module.init, method="mix"), static_argnums=2)
    params = init(jax.random.key(0), np.zeros((1, 8, 256), np.float32), 64)["params"]
    np.testing.assert_allclose(np.std(params["queries"]), 0.5, rtol=0.05)
