"""Layers beside attention: positions, rotation, drop path, MLPs and norms, by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cropr_jax.core import layers
from cropr_jax.core.layers import LayerNorm, LayerScale, Mlp, SwiGlu

gelu = jax.jit(layers.gelu)
rotate = jax.jit(layers.rotate)
drop_path = jax.jit(layers.drop_path, static_argnums=1)


def test_gelu_is_the_exact_one():
    x = np.linspace(-6, 6, 49, dtype=np.float32)
    expected = 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    np.testing.assert_allclose(gelu(x), expected, atol=1e-6)
    # The approximation by tanh is off by up to 5e-4.
    assert np.abs(jax.nn.gelu(x, approximate=True) - expected).max() > 1e-4


def test_sincos_positions_by_hand():
    """Sine and cosine of the column, then of the row, at frequencies 1 and 0.01."""
    expected = [
        [f(place * omega) for place in (column, row) for f in (math.sin, math.cos)
         for omega in (1, 0.01)]
        for row in range(2) for column in range(3)
    ]  # fmt: skip
    np.testing.assert_allclose(layers.sincos_positions((2, 3), 8), expected, atol=1e-6)
    with pytest.raises(ValueError, match="width divisible by 4, found 6"):
        layers.sincos_positions((2, 3), 6)


def test_rope_angles_by_hand():
    """A grid of 2 x 8 is drawn out or pressed together to the 4 x 4 that was trained on."""
    coordinates = jnp.array([[[1.0, 6.0], [0.0, 0.5]]])
    found = layers.rope_angles(coordinates, (2, 8), (4, 4), 8)
    expected = [[2, 0.02, 3, 0.03], [0, 0, 0.25, 0.0025]]
    np.testing.assert_allclose(found, [expected], rtol=1e-6)


def test_a_quarter_turn():
    """Neighbouring channels are a pair, each of which has its own angle."""
    x = jnp.array([1.0, 0.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    found = rotate(x, jnp.array([[[math.pi / 2, math.pi]]]))
    np.testing.assert_allclose(found[0, 0, 0], [0, 1, -3, -4], atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.floats(-3, 3))
def test_rotation_keeps_lengths_and_tells_differences(seed, shift):
    random = np.random.default_rng(seed)
    query, key = random.normal(size=(2, 1, 3, 2, 4)).astype(np.float32)
    angles, others = random.normal(size=(2, 1, 3, 2)).astype(np.float32)
    turned = rotate(query, angles)
    np.testing.assert_allclose(
        np.linalg.norm(turned, axis=-1), np.linalg.norm(query, axis=-1), rtol=1e-5
    )
    shift = np.float32(shift)
    products = [
        (np.asarray(rotate(query, angles + more)) * rotate(key, others + more)).sum(-1)
        for more in (np.float32(0), shift)
    ]
    np.testing.assert_allclose(*products, atol=1e-4)
    np.testing.assert_allclose(rotate(turned, -angles), query, atol=1e-5)


def test_rotation_is_in_float32():
    """In bfloat16 the sine of a small angle times a channel would be lost beside a large one."""
    x = jnp.array([1.0, 1.0], jnp.bfloat16).reshape(1, 1, 1, 2)
    angle = jnp.array([[[math.pi / 4]]])
    found = rotate(x, angle)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32)[0, 0, 0], [0, 2**0.5], atol=4e-3)
    assert abs(float(found[0, 0, 0, 0])) < 1e-6


def test_upsampling_takes_pixel_centres_at_half():
    x = jnp.array([0.0, 4.0]).reshape(1, 1, 2, 1)
    found = layers.upsample(x, (2, 4))
    np.testing.assert_allclose(found[0, ..., 0], [[0, 1, 3, 4]] * 2, atol=1e-6)


def test_drop_path_by_hand():
    x = np.ones((3, 2, 2), np.float32) * np.array([1, 2, 3], np.float32)[:, None, None]
    found = drop_path(x, 0.2, np.array([0.1, 0.79, 0.81], np.float32))
    np.testing.assert_allclose(found[:, 0, 0], [1.25, 2.5, 0])
    np.testing.assert_array_equal(drop_path(x, 0.2, None), x)
    np.testing.assert_array_equal(drop_path(x, 0.0, np.ones(3, np.float32)), x)
    half = drop_path(x.astype(jnp.bfloat16), 0.5, np.zeros(3, np.float32))
    assert half.dtype == jnp.bfloat16


def test_drop_path_keeps_the_mean():
    x = np.full((1000, 1, 1), 3, np.float32)
    draw = (np.arange(1000, dtype=np.float32) + 0.5) / 1000
    found = np.asarray(drop_path(x, 0.3, draw))
    assert found.mean() == pytest.approx(3, rel=1e-5) and (found == 0).sum() == 300


def params_of(layer, x, seed=0):
    """Random parameters, biases too."""
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape)), shapes)


def apply(layer, params, x):
    return np.asarray(jax.jit(layer.apply)({"params": params}, x))


def linear(params, x):
    return x @ np.asarray(params["kernel"]) + np.asarray(params["bias"])


X = np.random.default_rng(5).normal(size=(2, 3, 4)).astype(np.float32)


def test_mlp_by_hand():
    layer = Mlp(6)
    params = params_of(layer, X)
    hidden = linear(params["fc1"], X)
    hidden = 0.5 * hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    np.testing.assert_allclose(apply(layer, params, X), linear(params["fc2"], hidden), atol=1e-4)
    other = apply(Mlp(6, activation=jax.nn.relu), params, X)
    expected = linear(params["fc2"], np.maximum(linear(params["fc1"], X), 0))
    np.testing.assert_allclose(other, expected, atol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
def test_gated_mlp_by_hand(norm):
    layer = SwiGlu(6, norm)
    params = params_of(layer, X)
    gate, hidden = linear(params["gate"], X), linear(params["up"], X)
    hidden = gate / (1 + np.exp(-gate)) * hidden
    assert ("norm" in params) == norm
    if norm:
        hidden = hidden - hidden.mean(-1, keepdims=True)
        hidden /= np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-6)
        hidden = hidden * params["norm"]["scale"] + params["norm"]["bias"]
    np.testing.assert_allclose(apply(layer, params, X), linear(params["down"], hidden), atol=1e-4)


def test_layer_scale():
    layer = LayerScale(0.1)
    params = jax.jit(layer.init)(jax.random.key(0), X)["params"]
    np.testing.assert_allclose(params["gamma"], np.full(4, 0.1), rtol=1e-6)
    gamma = np.array([1, 2, 0, -1], np.float32)
    np.testing.assert_allclose(apply(layer, {"gamma": gamma}, X), X * gamma, rtol=1e-6)
    half = LayerScale(0.1, jnp.bfloat16)
    assert apply(half, params, X.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_norms_stand_large_means():
    """As those of residual streams: E[x^2] - E[x]^2 would lose the variance to rounding."""
    x = (X[:1] + 10_000).astype(np.float32)
    exact = x.astype(np.float64)
    exact = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)
    params = {"scale": np.ones(4, np.float32), "bias": np.zeros(4, np.float32)}
    np.testing.assert_allclose(apply(LayerNorm(), params, x), exact, atol=5e-3)
    # The epsilon is that of timm's ViTs, of which a tiny variance takes notice.
    small = np.array([[[1e-3, -1e-3]]], np.float32)
    params = {"scale": np.ones(2, np.float32), "bias": np.zeros(2, np.float32)}
    expected = 1 / math.sqrt(2)
    np.testing.assert_allclose(apply(LayerNorm(), params, small), [[[expected, -expected]]], 1e-4)
