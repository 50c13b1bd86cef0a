"""Functions as ONNX graphs, against what JAX computes of them."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from jax import lax

from cropr_jax.core import layers, routing
from cropr_jax.errors import ConfigError
from cropr_jax.models.to_onnx import convert
from cropr_jax.models.to_onnx.graph import BATCH

X = np.float32([[3, 1, np.nan, 1, -2, 3], [0, -0.0, 5, np.nan, np.nan, -1]])
FEATURES = np.random.default_rng(0).standard_normal((2, 6, 4), np.float32)
MATRIX = np.random.default_rng(1).standard_normal((4, 3, 2), np.float32)
COUNTS = np.int32([[-7, -1, 0, 5, 6, 9], [1, 2, 3, 4, 5, 6]])


def make(function, example, params=None):
    """The ONNX model of `function(*params, x)` for any batch size."""
    batch = jax.export.symbolic_shape(BATCH)
    shape = jax.ShapeDtypeStruct((*batch, *example.shape[1:]), example.dtype)
    params = params or {}
    file = convert.convert(lambda leaves, x: function(*leaves, x), params, shape, {"a": [1, "b"]})
    model = onnx.load_from_string(file)
    onnx.checker.check_model(model, full_check=True)
    return model


def run(model, x):
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {"images": x})[0]


def operators(model):
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize(
    ("function", "example"),
    [
        (lambda x: lax.sort(x), X),
        (lambda x: jnp.pad(x, ((0, 0), (2, 1), (0, 0)), constant_values=3.0), FEATURES),
        (lambda x: lax.slice_in_dim(x, 1, 6, 2, axis=1) + x[:, :1], FEATURES),
        (lambda x: x[:, 3], FEATURES),
        (lambda x: x / 4 - x**3 + jnp.sqrt(jnp.abs(x)) * jnp.sign(x), FEATURES),
        (lambda x: x * jax.nn.sigmoid(x) + jnp.tanh(x) - jnp.maximum(x, 0.5), FEATURES),
        (lambda x: jnp.where((x > 0) & (x != 1), x, jnp.float32(-1)), FEATURES),
        (lambda x: jnp.stack([x // 4, x % 4, lax.rem(x, jnp.int32(4))], axis=-1), COUNTS),
        (
            lambda x: jnp.concatenate([jnp.ones((x.shape[0], 2, 4)), x], axis=1).sum((1, 2)),
            FEATURES,
        ),
        (lambda x: jnp.einsum("btd,bsd->bts", x, x), FEATURES),
        (lambda x: jnp.einsum("btd,btd->bt", x, x), FEATURES),
        (lambda x: jnp.einsum("btd,dhk->bhtk", x, MATRIX), FEATURES),
        (lambda x: jax.nn.softmax(x, axis=1) + x.max(2, keepdims=True), FEATURES),
        (lambda x: jnp.exp(x) / jnp.exp(x).sum(1, keepdims=True), FEATURES),
        (lambda x: jnp.broadcast_to(jnp.arange(4.0), x.shape), FEATURES),
        (lambda x: jnp.arange(6)[:, None] * jnp.ones((6, 4)) + x, FEATURES),
        (lambda x: jnp.cumsum(x, 1) + lax.cumsum(x, 2, reverse=True), FEATURES),
        (lambda x: jnp.where(jnp.isfinite(x), x, 9) + jnp.where((x > 0).any(1)[:, None], 1, 2), X),
        (
            lambda x: jnp.logaddexp(x, -9.0) + jnp.log1p(jnp.exp(3 * x - 9)) / jnp.exp(3 * x),
            FEATURES,
        ),
        (lambda x: x.argmax(1) + 10 * x.argmin(1), X),
        (lambda x: x.argmax(1) + 10 * x.argmin(1), COUNTS),
        (lambda x: (x > 1).argmax(1) + 10 * (x > 1).argmin(1), COUNTS),
        (
            lambda x: (
                jnp.minimum(*jnp.split(x, [1], axis=1)[:1] * 2) + x.min((1, 2))[:, None, None]
            ),
            FEATURES,
        ),
        (lambda x: jnp.concatenate(jnp.split(x, [1, 4], axis=1)[::-1], axis=1), FEATURES),
        (lambda x: x[:, 1::2] + x[:, ::2][:, :, np.array([0, 3, 3, 1])], FEATURES),
        (lambda x: x.at[:, jnp.array([[1, 0], [5, 5]])].get(mode="promise_in_bounds"), FEATURES),
    ],
)
def test_equals_jax(function, example):
    model = make(function, example)
    for x in (example, example[:1], np.tile(example, (4,) + (1,) * (example.ndim - 1))):
        np.testing.assert_allclose(run(model, x), jax.jit(function)(x), rtol=1e-5, atol=1e-6)


def test_ranks_ties_and_nan_as_jax_does():
    ties = np.random.default_rng(0).integers(0, 5, (9, 64)).astype(np.float32)
    ties[2, 3:9] = np.nan
    ties[3] = -np.inf
    np.testing.assert_array_equal(
        run(make(routing.rank, ties), ties), routing.rank(jnp.asarray(ties))
    )


def test_takes_and_inverts_an_order():
    def function(x):
        order = routing.rank(x[:, :, 0])
        head, tail = routing.divide(x, order, 2)
        back = routing.invert(order)
        return routing.take(jnp.concatenate([head, tail], axis=1), back)

    np.testing.assert_array_equal(run(make(function, FEATURES), FEATURES), FEATURES)


def test_uses_one_operator_where_there_is_one():
    assert operators(make(lambda x: layers.gelu(x), FEATURES)).count("Gelu") == 1
    attention = make(lambda x: jax.nn.softmax(x, axis=-1), FEATURES)
    assert operators(attention) == ["Softmax", "Identity"]
    norm = layers.LayerNorm()
    params = {"bias": np.float32([1, 2, 3, 4]), "scale": np.float32([5, 6, 7, 8])}

    def normed(bias, scale, x):
        return norm.apply({"params": {"bias": bias, "scale": scale}}, x)

    model = make(normed, FEATURES, params)
    assert operators(model) == ["LayerNormalization", "Identity"]
    assert {constant.name for constant in model.graph.initializer} == {"bias", "scale"}
    expected = normed(*params.values(), FEATURES)
    np.testing.assert_allclose(run(model, FEATURES), expected, atol=1e-5)


def test_keeps_no_broadcasts_and_nothing_idle():
    def function(scale, x):
        unused = jnp.sin(x).sum()
        del unused
        return (x + jnp.square(scale)) * jnp.float32(2)

    model = make(function, FEATURES, {"scale": np.float32([1, 2, 3, 4])})
    assert operators(model) == ["Add", "Mul", "Identity"]


def test_describes_itself():
    model = make(jnp.exp, FEATURES)
    assert {prop.key: json.loads(prop.value) for prop in model.metadata_props} == {"a": [1, "b"]}
    assert [entry.version for entry in model.opset_import] == [convert.OPSET]
    (source,), (result,) = model.graph.input, model.graph.output
    assert (source.name, result.name) == ("images", "logits")
    for value in (source, result):
        sizes = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        assert sizes == [BATCH, 6, 4]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: jnp.cumprod(x, axis=1), "'cumprod', for which there is no rule"),
        (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), "no rule (random draws"),
        (lambda x: lax.fori_loop(0, 3, lambda _, y: y + x, x), "'scan', for which there is no"),
        (lambda x: x + jnp.arange(x.shape[0])[:, None, None], "iota over the batch"),
        (lambda x: x.reshape(-1, 4), "a dimension of 6*batch has no rule"),
        (lambda x: jnp.einsum("btd,cud->btcu", x, x), "the batch joined with others"),
        (lambda x: x.at[:, jnp.array([1, 6])].get(mode="clip"), "a gather with"),
        (lambda x: jnp.take_along_axis(x, x.argmax(1, keepdims=True), 1), "a gather with"),
        (lambda x: x[:1], "a gather with"),
        (lambda x: lax.slice_in_dim(x, 0, 1), "a part of the batch has no rule"),
        (lambda x: lax.pad(x, jnp.float32(0), [(0, 0, 0), (0, 0, 1), (0, 0, 0)]), "between values"),
        (lambda x: lax.sort((x, x), num_keys=2)[0], "by two keys"),
        (lambda x: lax.sort(x, dimension=0), "a sort of the batch"),
        (lambda x: x.astype(jnp.int32) & 1, "bitwise arithmetic"),
        (lambda x: lax.reduce_or(x.astype(jnp.int32), axes=(1,)), "bitwise arithmetic"),
    ],
)
def test_refuses_what_has_no_rule(function, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make(function, FEATURES)


def test_refuses_more_than_a_file_holds():
    huge = {"kernel": np.broadcast_to(np.float32(0), (2**29, 1))}
    with pytest.raises(ConfigError, match="more than 2 GiB; use format='jax'"):
        make(lambda kernel, x: x + kernel[0], FEATURES, huge)
