"""Routing: ranks, splits, inverses and their gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from cropr_jax.core import routing
from cropr_jax.tokens import concatenate, from_features

# Few shapes, so that hypothesis varies numbers and not programs: one image, and M = K, R = 0 too.
SHAPES = [(1, 1), (2, 7)]
rank = jax.jit(routing.rank)


@st.composite
def cases(draw):
    """Scores with ties, infinities and NaN; a keep count from nothing to everything; a prefix."""
    batch, patches = draw(st.sampled_from(SHAPES))
    value = st.sampled_from([-np.inf, -2.0, -0.0, 0.0, 0.5, 1.0, 3.0, np.inf, np.nan])
    scores = draw(st.lists(value, min_size=batch * patches, max_size=batch * patches))
    keep = draw(st.sampled_from([0, patches // 2, patches]))
    prefix = draw(st.sampled_from([0, 1, 5]))
    return np.array(scores, np.float32).reshape(batch, patches), keep, prefix


@functools.partial(jax.jit, static_argnums=(2, 3))
def split(x, scores, keep, prefix):
    tokens = from_features(x, (1, scores.shape[1]), prefix)
    kept, pruned = routing.split(tokens, routing.rank(scores), keep)
    return tokens, kept, pruned, routing.raster_order(concatenate(kept, pruned))


def expected_order(row):
    """Highest first, ties by position, NaN last: written with Python's stable sort."""
    return sorted(range(len(row)), key=lambda i: (np.isnan(row[i]), -np.nan_to_num(row[i])))


@settings(deadline=None, max_examples=60)
@given(cases())
def test_rank_orders_ties_and_nan(case):
    scores, _, _ = case
    expected = [expected_order(row) for row in scores]
    np.testing.assert_array_equal(rank(scores), expected)


@settings(deadline=None, max_examples=60)
@given(cases())
def test_split_partitions_and_keeps_the_prefix(case):
    scores, keep, prefix = case
    batch, patches = scores.shape
    x = np.random.default_rng(0).normal(size=(batch, prefix + patches, 3)).astype(np.float32)
    _, kept, pruned, _ = jax.device_get(split(x, scores, keep, prefix))

    assert kept.patches == keep and pruned.patches == patches - keep
    assert kept.prefix == prefix and pruned.prefix == 0
    np.testing.assert_array_equal(kept.x[:, :prefix], x[:, :prefix])
    index = np.concatenate([kept.index, pruned.index], axis=1)
    np.testing.assert_array_equal(np.sort(index, axis=1), np.tile(np.arange(patches), (batch, 1)))
    for row in range(batch):
        np.testing.assert_array_equal(kept.x[row, prefix:], x[row, prefix:][kept.index[row]])
        np.testing.assert_array_equal(pruned.x[row], x[row, prefix:][pruned.index[row]])
        assert list(index[row]) == expected_order(scores[row])


@settings(deadline=None, max_examples=30)
@given(cases())
def test_fusion_and_raster_order_undo_the_split(case):
    scores, keep, prefix = case
    batch, patches = scores.shape
    x = np.random.default_rng(1).normal(size=(batch, prefix + patches, 2)).astype(np.float32)
    tokens, _, _, restored = split(x, scores, keep, prefix)
    np.testing.assert_array_equal(restored.x, x)
    np.testing.assert_array_equal(restored.index, tokens.index)


def test_permuted_tokens_give_the_same_kept_set():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, 1 + 9, 4)).astype(np.float32)
    scores = rng.normal(size=(2, 9)).astype(np.float32)
    shuffle = rng.permutation(9)
    tokens = jax.device_get(jax.jit(from_features, static_argnums=(1, 2))(x, (3, 3), 1))
    shuffled = tokens.replace(
        x=np.concatenate([tokens.x[:, :1], tokens.x[:, 1:][:, shuffle]], axis=1),
        index=tokens.index[:, shuffle],
    )
    keep_four = jax.jit(lambda tokens, scores: routing.split(tokens, routing.rank(scores), 4))
    first, _ = keep_four(tokens, scores)
    second, _ = keep_four(shuffled, scores[:, shuffle])
    np.testing.assert_array_equal(first.index, second.index)
    np.testing.assert_array_equal(first.x, second.x)


@pytest.mark.parametrize("keep", [0, 3, 7])
def test_gradients_of_the_split(keep):
    rng = np.random.default_rng(3)
    order = rank(rng.normal(size=(2, 7)).astype(np.float32))
    weight = jnp.asarray(rng.normal(size=(2, 7, 3)).astype(np.float32))

    def both(x):
        kept, pruned = routing.divide(x, order, keep)
        return (jnp.concatenate([kept**2, pruned], axis=1) * weight).sum()

    def kept_only(x):
        return (routing.divide(x, order, keep)[0] ** 3).sum()

    x = jnp.asarray(rng.normal(size=(2, 7, 3)).astype(np.float32))
    check_grads(jax.jit(both), (x,), order=1, modes=["rev"], atol=1e-2, rtol=1e-2)
    check_grads(jax.jit(kept_only), (x,), order=1, modes=["rev"], atol=1e-2, rtol=1e-2)


def test_backward_pass_holds_no_scatter():
    order = rank(np.arange(8, dtype=np.float32)[None])
    x = np.ones((1, 8, 4), np.float32)
    gradient = jax.jit(jax.grad(lambda x: (routing.divide(x, order, 5)[0] ** 2).sum()))
    assert "scatter" not in gradient.lower(x).as_text()


def test_pruned_after_is_the_map_of_blocks():
    kept = jnp.array([[3, 0]])
    pruned = (jnp.array([[5, 1]]), jnp.array([[2, 4]]))
    found = routing.pruned_after(kept, pruned, (2, 7), (2, 3))
    np.testing.assert_array_equal(found, [[[0, 2, 7], [0, 7, 2]]])


def test_impossible_requests_say_so():
    tokens = from_features(jnp.zeros((1, 5, 2)), (2, 2), 1)
    order = rank(np.zeros((1, 4), np.float32))
    with pytest.raises(ValueError, match="cannot keep 5 of 4"):
        routing.split(tokens, order, 5)
    kept, _ = jax.jit(lambda tokens: routing.split(tokens, order, 2))(tokens)
    with pytest.raises(ValueError, match="2 patch tokens cannot fill a 2 x 2 grid"):
        routing.raster_order(kept)
    with pytest.raises(ValueError, match="5 tokens do not match"):
        from_features(jnp.zeros((1, 5, 2)), (2, 2), 0)
    with pytest.raises(ValueError, match="only the first"):
        concatenate(kept, tokens)
