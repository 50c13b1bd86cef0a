"""PatchMerger: the reference's numbers, and what its formula promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokred
from conftest import fixture_names, load_fixture

from cropr_jax.reducers.base import Context
from cropr_jax.reducers.patchmerger import PatchMerger
from cropr_jax.tokens import from_features

KEEP = 3


def merge(x, queries=None, keep=KEEP, **options):
    """The patch tokens that come out, and the weights."""
    module, tokens = PatchMerger(**options), from_features(x, (2, x.shape[1] // 2), 0)
    if queries is None:
        queries = jax.random.normal(jax.random.key(1), (keep, x.shape[-1]))
    width = x.shape[-1]
    norm = {"scale": 1 + 0.1 * jnp.arange(width), "bias": 0.2 * jnp.arange(width)}
    params = {"queries": queries, "norm": norm}
    made, gone, out = module.apply({"params": params}, tokens, Context(), keep=keep, train=False)
    assert gone is None
    return made.x, out["weights"]


def normed(x):
    width = x.shape[-1]
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return scaled * (1 + 0.1 * np.arange(width)) + 0.2 * np.arange(width)


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(0), (2, 8, 4))


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
    np.testing.assert_allclose(merged, weights @ normed(np.asarray(x)), atol=1e-5)


def test_order_and_affine_changes_of_the_inputs_do_not_matter(x):
    merged, _ = merge(x)
    shuffled, _ = merge(x[:, ::-1])
    np.testing.assert_allclose(shuffled, merged, atol=1e-5)
    scale = 2 + jnp.arange(8.0)[None, :, None]
    rescaled, _ = merge(x * scale + 7 * scale)
    np.testing.assert_allclose(rescaled, merged, atol=1e-3)


def test_zero_and_equal_queries(x):
    uniform, weights = merge(x, jnp.zeros((KEEP, 4)))
    np.testing.assert_allclose(weights, 1 / 8, atol=1e-6)
    mean = normed(np.asarray(x)).mean(1, keepdims=True)
    np.testing.assert_allclose(uniform, np.repeat(mean, KEEP, 1), atol=1e-5)
    equal, _ = merge(x, jnp.full((KEEP, 4), 0.7))
    np.testing.assert_array_equal(equal[:, 0], equal[:, 1])


def test_dividing_by_the_root_of_the_width_keeps_initial_weights_soft():
    x = jax.random.normal(jax.random.key(0), (1, 64, 256))
    queries = jax.random.normal(jax.random.key(1), (8, 256))
    # Without a norm's weights that differ by channel: those of `merge` blow up the logits.
    norm = {"scale": jnp.ones(256), "bias": jnp.zeros(256)}
    largest = {}
    for scale in ("none", "width"):
        weights, _ = PatchMerger(scale=scale).apply(
            {"params": {"queries": queries, "norm": norm}}, x, 8, method="mix"
        )
        largest[scale] = float(weights.max(-1).mean())
    assert largest["none"] > 0.8 and largest["width"] < 0.2


def test_init_std(x):
    module = PatchMerger(init_std=0.5)
    params = module.init(jax.random.key(0), jnp.zeros((1, 8, 256)), 64, method="mix")["params"]
    np.testing.assert_allclose(params["queries"].std(), 0.5, rtol=0.05)
