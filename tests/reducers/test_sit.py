"""SiT: the reference's numbers, and what a softmax over the tokens promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokred
from conftest import fixture_names, load_fixture

from cropr_jax.reducers.sit import SiT

KEEP, TOKENS, WIDTH = 3, 8, 6


@pytest.fixture(scope="module")
def params():
    init = jax.jit(functools.partial(SiT().init, method="mix"), static_argnums=2)
    drawn = jax.device_get(init(jax.random.key(1), jnp.zeros((1, TOKENS, WIDTH)), KEEP))
    # Large logits, so that the weights are far from uniform.
    return jax.tree.map(lambda leaf: 200 * leaf if leaf.ndim == 2 else leaf, drawn["params"])


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(2, TOKENS, WIDTH)).astype(np.float32)


@jax.jit
def apply(params, x):
    return SiT().apply({"params": params}, x, KEEP, method="mix")


def mix(params, x):
    """Outputs and weights."""
    weights, values = jax.device_get(apply(params, x))
    return weights @ values, weights


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("tokred_sit"))
def test_reference(name):
    arrays, meta = load_fixture(name)
    model = tokred.build(meta, "sit", meta["config"]["cluster_count"])

    def convert(weights):
        return {
            "norm": tokred.norm(weights, "weight.0"),
            "fc1": tokred.linear(weights, "weight.1"),
            "fc2": tokred.linear(weights, "weight.3"),
            "scale": weights["scale"].reshape(()),
        }

    params = tokred.params(arrays, meta, "cluster_layers", convert)
    _, out = tokred.run(model, params, arrays)
    for site, block in enumerate(meta["config"]["args"]["reduction_loc"]):
        weights = arrays[f"out/reduce.{site}/out1"]
        np.testing.assert_allclose(out["sites"][site]["weights"], weights, atol=tokred.TOKENS)
        hard = out["sites"][site]["weights"].argmax(1)
        np.testing.assert_array_equal(hard, arrays[f"out/viz.{block}/Assignment_Maps"])


def test_outputs_are_averages_of_the_tokens(params, x):
    mixed, weights = mix(params, x)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert weights.max() > 0.5
    np.testing.assert_allclose(mixed, weights @ x, atol=1e-6)
    assert (mixed <= x.max(1, keepdims=True)).all() and (mixed >= x.min(1, keepdims=True)).all()


def test_scale_of_zero_gives_the_mean(params, x):
    mixed, _ = mix(params | {"scale": np.float32(0)}, x)
    mean = np.repeat(x.mean(1, keepdims=True), KEEP, 1)
    np.testing.assert_allclose(mixed, mean, atol=1e-6)


def test_order_does_not_matter_and_equal_tokens_stay(params, x):
    np.testing.assert_allclose(mix(params, x[:, ::-1])[0], mix(params, x)[0], atol=1e-5)
    equal = np.broadcast_to(x[:, :1], x.shape)
    np.testing.assert_allclose(mix(params, equal)[0], equal[:, :KEEP], atol=1e-6)


def test_size_of_the_module(params):
    """d^2/2 + d/2 + 2d, and (d/2 + 1) K, and the scale (526,849 + 513 K at width 1,024)."""
    half = WIDTH // 2
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == (
        WIDTH * half + half + 2 * WIDTH + (half + 1) * KEEP + 1
    )
