"""Attention: its kernels by device, softmax by hand, places, sources and what reducers ask for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cropr_jax.core import attention
from cropr_jax.core.attention import Attention, attend, attend_masked, choose_attention, col_mean
from cropr_jax.tokens import MASKED

HALF = {"backend": "gpu", "dtype": jnp.bfloat16, "head_width": 64}
WIDTH, HEADS = 8, 2


@pytest.mark.parametrize(("requested", "device", "expected"), [
    ("auto", {}, "cudnn"),
    ("auto", {"backend": "cuda", "dtype": jnp.float16}, "cudnn"),
    ("auto", {"head_width": 128}, "cudnn"),
    ("auto", {"head_width": 136}, "xla"),
    ("auto", {"head_width": 20}, "xla"),
    ("auto", {"backend": "cpu"}, "xla"),
    ("auto", {"backend": "tpu"}, "xla"),
    ("auto", {"dtype": jnp.float32}, "xla"),
    ("xla", {}, "xla"),
    ("cudnn", {}, "cudnn"),
])  # fmt: skip
def test_the_kernel_that_suits_the_device(requested, device, expected):
    assert choose_attention(requested, **HALF | device) == expected


def test_a_kernel_that_cannot_run_is_refused():
    found = r"found cpu, bfloat16, 64\. Use 'auto'"
    with pytest.raises(ValueError, match=f"'cudnn' needs a CUDA device, .*{found}"):
        choose_attention("cudnn", **HALF | {"backend": "cpu"})
    with pytest.raises(ValueError, match="found gpu, float32, 20"):
        choose_attention("cudnn", backend="gpu", dtype=jnp.float32, head_width=20)
    with pytest.raises(ValueError, match="found 'flash', expected 'auto', 'xla' or 'cudnn'"):
        choose_attention("flash", **HALF)


def by_hand(query, key, value, bias=0.0):
    """Softmax attention of one image and one head, in float64."""
    logits = query @ key.T / query.shape[-1] ** 0.5 + bias
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value


def draw(*shapes, seed=0):
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def test_attention_is_the_softmax_over_keys():
    """Of other keys than queries, each head by itself, with a bias of each image's keys."""
    query, key, value = draw((2, 3, HEADS, 4), (2, 5, HEADS, 4), (2, 5, HEADS, 4))
    (bias,) = draw((2, 1, 1, 5), seed=1)
    for added in (None, bias):
        found = jax.jit(attend)(query, key, value, added)
        for image in range(2):
            for head in range(HEADS):
                parts = [x[image, :, head].astype(np.float64) for x in (query, key, value)]
                expected = by_hand(*parts, 0.0 if added is None else bias[image, 0])
                np.testing.assert_allclose(found[image, :, head], expected, atol=1e-6)


def test_two_keys_by_hand():
    """Logits 0 and ln 3 at a head width of 4: weights 1/4 and 3/4."""
    query = jnp.full((1, 1, 1, 4), 0.5)
    key = jnp.stack([jnp.zeros(4), jnp.full(4, np.log(3.0))])[None, :, None]
    value = jnp.array([[0.0, 8.0]]).reshape(1, 2, 1, 1) * jnp.ones(4)
    np.testing.assert_allclose(attend(query, key, value, None), np.full((1, 1, 1, 4), 6.0), 1e-6)


def test_in_half_precision_the_softmax_stays_in_float32():
    """Logits 40 apart from 40.06 would be equal in bfloat16, where steps are 0.25 there."""
    query = jnp.full((1, 1, 1, 4), 2.0, jnp.bfloat16)
    key = jnp.array([[10.0] * 4, [10.0] * 3 + [10.0625]], jnp.bfloat16).reshape(1, 2, 1, 4)
    value = jnp.eye(2, 4, dtype=jnp.bfloat16).reshape(1, 2, 1, 4)
    found = attend(query, key, value, None)
    assert found.dtype == jnp.bfloat16
    expected = 1 / (1 + np.exp([0.0625, -0.0625]))
    np.testing.assert_allclose(np.asarray(found, np.float32)[0, 0, 0, :2], expected, atol=2e-3)


def test_column_means_take_every_chunk_of_queries():
    """At one more than a chunk, and with a prefix that does not vote."""
    count = attention.COL_MEAN_CHUNK + 3
    query, key = draw((1, count, 1, 4), (1, count, 1, 4))
    matrix = by_hand(query[0, :, 0], key[0, :, 0], np.eye(count))
    for skip in (0, 2):
        found = jax.jit(col_mean, static_argnums=2)(query, key, skip)
        np.testing.assert_allclose(found[0], matrix[skip:].mean(0), atol=1e-6)


@functools.cache
def made(heads=HEADS, **fields):
    """A layer, and parameters with random values, biases too."""
    layer = Attention(heads, **fields)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((1, 2, WIDTH)))["params"]
    random = np.random.default_rng(0)
    return layer, jax.tree.map(
        lambda leaf: jnp.asarray(random.normal(size=leaf.shape) * 0.5, leaf.dtype), shapes
    )


@functools.partial(jax.jit, static_argnums=0)
def run(layer, params, x, *args, **kwargs):
    return layer.apply({"params": params}, x, *args, **kwargs)


def output(layer, params, *args, **kwargs):
    return np.asarray(run(layer, params, *args, **kwargs)[0])


def test_the_layer_by_hand():
    layer, params = made()
    (x,) = draw((1, 3, WIDTH))
    query, key, value = (
        np.einsum("td,dhk->thk", x[0], params[name]["kernel"]) + params[name]["bias"]
        for name in ("query", "key", "value")
    )
    heads = [by_hand(query[:, h], key[:, h], value[:, h]) for h in range(HEADS)]
    out = params["out"]
    expected = np.einsum("htk,hkd->td", np.stack(heads), out["kernel"]) + out["bias"]
    np.testing.assert_allclose(output(layer, params, x)[0], expected, atol=1e-5)


def test_padding_is_as_if_it_were_not_there():
    layer, params = made()
    (x,) = draw((2, 5, WIDTH))
    bias = np.zeros((2, 5), np.float32)
    bias[:, 2] = MASKED
    stay = [0, 1, 3, 4]
    expected = output(layer, params, x[:, stay])
    np.testing.assert_allclose(output(layer, params, x, bias)[:, stay], expected, atol=1e-5)


def test_keys_and_values_of_another_source():
    """Each query alone, and the source in another order, give the same."""
    layer, params = made()
    x, source = draw((1, 3, WIDTH), (1, 5, WIDTH))
    found = output(layer, params, x, source=source)
    assert found.shape == x.shape
    np.testing.assert_allclose(found, output(layer, params, x, source=source[:, ::-1]), atol=1e-5)
    np.testing.assert_allclose(found[:, :1], output(layer, params, x[:, :1], source=source), 1e-4)
    np.testing.assert_allclose(output(layer, params, x, source=x), output(layer, params, x), 1e-6)


def test_rotation_tells_how_far_tokens_are_apart():
    """Turning all of them further changes nothing, turning one of them does."""
    layer, params = made()
    x, angles = draw((1, 4, WIDTH), (1, 4, WIDTH // HEADS // 2))
    found = output(layer, params, x, angles=angles)
    np.testing.assert_allclose(output(layer, params, x, angles=angles + 0.7), found, atol=1e-5)
    assert np.abs(
        output(layer, params, x, angles=angles * [[[1], [2], [1], [1]]]) - found
    ).max() > (1e-3)
    # Of a source each side has angles of its own.
    apart = output(layer, params, x, angles=angles, source=x, source_angles=angles)
    np.testing.assert_allclose(apart, found, atol=1e-6)
    shifted = output(layer, params, x, angles=angles, source=x, source_angles=angles + 0.7)
    assert np.abs(shifted - found).max() > 1e-3


def test_a_bias_of_keys_cancels_unless_tokens_are_turned():
    layer, params = made()
    other = params | {"key": params["key"] | {"bias": params["key"]["bias"] + 1.0}}
    x, angles = draw((1, 4, WIDTH), (1, 4, WIDTH // HEADS // 2))
    np.testing.assert_allclose(output(layer, other, x), output(layer, params, x), atol=1e-5)
    turned = [output(layer, which, x, angles=angles) for which in (other, params)]
    assert np.abs(turned[0] - turned[1]).max() > 1e-3
    assert "bias" not in made(use_key_bias=False)[1]["key"]


def test_what_reducers_ask_for():
    """Only that; the prefix votes in one of the means alone; with angles, keys are turned ones."""
    needs = frozenset({"cls_row", "col_mean", "col_mean_all"})
    layer, params = made(needs=needs, prefix=2)
    x, angles = draw((1, 4, WIDTH), (1, 4, WIDTH // HEADS // 2))
    (bias,) = draw((1, 4), seed=1)
    for turned in (None, angles):
        _, extras = run(layer, params, x, key_bias=bias, angles=turned)
        assert extras.keys() == needs
        query, key = (
            np.einsum("btd,dhk->bthk", x, params[name]["kernel"]) + params[name]["bias"]
            for name in ("query", "key")
        )
        if turned is not None:
            query, key = (
                attention.rotate(jnp.asarray(side), jnp.asarray(turned)) for side in (query, key)
            )
        sides = [(query[0, :, h], key[0, :, h]) for h in range(HEADS)]
        matrix = np.stack([by_hand(q, k, np.eye(4), bias) for q, k in sides])
        np.testing.assert_allclose(extras["cls_row"][0], matrix[:, 0], atol=1e-5)
        np.testing.assert_allclose(extras["col_mean"][0], matrix[:, 2:].mean((0, 1)), atol=1e-5)
        np.testing.assert_allclose(extras["col_mean_all"][0], matrix.mean((0, 1)), atol=1e-5)
    assert run(made()[0], params, x)[1] == {}


def test_a_policy_takes_the_place_of_the_bias():
    """All tokens of policy 1 see each other; the bias of padding is not read."""
    layer, params = made()
    (x,) = draw((1, 4, WIDTH))
    bias = np.array([[0, MASKED, 0, 0]], np.float32)
    found = output(layer, params, x, bias, policy=np.ones((1, 4), np.float32))
    np.testing.assert_allclose(found, output(layer, params, x), atol=1e-5)


def test_a_token_of_policy_0_alone_sees_itself():
    """Its output is its own value where all others have policy 0 too."""
    query, key, value = draw(*[(1, 3, 1, 4)] * 3)
    found = jax.jit(attend_masked)(query, key, value, np.zeros((1, 3), np.float32))
    np.testing.assert_allclose(found, value, atol=1e-4)


@pytest.mark.parametrize("biased", [False, True])
def test_the_fused_kernel_gets_what_the_plain_one_has(monkeypatch, biased):
    """cuDNN's call, computed by XLA here, with the bias folded into the heads."""
    calls = []

    def fused(query, key, value, *, scale, implementation):
        calls.append((implementation, query.shape[-1]))
        return attention_of_jax(query, key, value, scale=scale, implementation="xla")

    attention_of_jax = jax.nn.dot_product_attention
    layer, params = made()
    (x,) = draw((2, 5, WIDTH))
    bias = jnp.log(jnp.array([[1.0, 3.0, 1.0, 2.0, 1.0]] * 2)) if biased else None
    expected = output(layer, params, x, bias)
    monkeypatch.setattr(attention, "choose_attention", lambda *_, **__: "cudnn")
    monkeypatch.setattr(jax.nn, "dot_product_attention", fused)
    found = jax.jit(lambda p, x: layer.apply({"params": p}, x, bias)[0])(params, x)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert calls == [("cudnn", 4 + attention.BIAS_CHANNELS * biased)]


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="width 8 is not divisible by 3 heads"):
        jax.eval_shape(Attention(3).init, jax.random.key(0), jnp.zeros((1, 2, WIDTH)))
