"""Tokens: whatever moves them moves every field that is marked for it, and no other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cropr_jax.core import routing
from cropr_jax.tokens import MASKED, Tokens, concatenate, from_features, moving_fields, unmerge

BATCH, PATCHES = 2, 5
# Written out here, so that a field that loses its mark is missed.
PER_TOKEN = ("x", "size", "valid", "policy")
PER_PATCH = ("index", "position")
OPTIONAL = ("position", "size", "valid", "policy")


@functools.partial(jax.jit, static_argnums=2)
def move(tokens, order, keep):
    """Both parts of a split, these in a row, and the tokens in another order."""
    kept, pruned = routing.split(tokens, order, keep)
    return kept, pruned, concatenate(kept, pruned), routing.reorder(tokens, order)


def filled(fields, prefix, seed=0):
    """Tokens with random numbers, other ones in every row, in `x`, `index` and `fields`."""
    random = np.random.default_rng(seed)

    def value(name):
        count = PATCHES + (prefix if name in PER_TOKEN else 0)
        rows = random.permutation(BATCH * count).reshape(BATCH, count)
        if name == "index":
            return rows.astype(np.int32)
        if name == "valid":
            return rows % 2 == 0
        width = {"x": 3, "position": 2}.get(name)
        rows = rows.astype(np.float32)
        return rows if width is None else np.repeat(rows[..., None], width, axis=2)

    named = {name: value(name) for name in ("x", "index", *fields)}
    return Tokens(**named, grid=(1, PATCHES), prefix=prefix, proportional=False)


@st.composite
def cases(draw):
    """Tokens with some of the fields, an order of each image's patches, and how many are kept."""
    fields = draw(st.sampled_from([OPTIONAL, ("policy",)]))
    prefix = draw(st.sampled_from([0, 2]))
    orders = [draw(st.permutations(range(PATCHES))) for _ in range(BATCH)]
    keep = draw(st.sampled_from([0, 3]))
    return filled(fields, prefix), np.array(orders, np.int32), keep


def values(tokens):
    """The marked fields that are there."""
    found = {name: getattr(tokens, name) for name in (*PER_TOKEN, *PER_PATCH)}
    return {name: np.asarray(value) for name, value in found.items() if value is not None}


def rows_of(tokens, order, prefix):
    """Every field with its patches in the given order, by NumPy alone.

    Args:
      tokens: p + m tokens.
      order: of some patches of each image.
      prefix: whether the prefix stands in front.
    """
    found = {}
    for name, value in values(tokens).items():
        head = tokens.prefix if name in PER_TOKEN else 0
        rows = order + head
        if prefix:
            rows = np.concatenate([np.tile(np.arange(head), (BATCH, 1)), rows], axis=1)
        found[name] = np.stack([row[chosen] for row, chosen in zip(value, rows, strict=True)])
    return found


def assert_holds(tokens, expected):
    """Exactly the expected fields, with these values."""
    found = values(tokens)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_marks_of_the_fields():
    assert {field.name: field.metadata["per"] for field in moving_fields()} == (
        dict.fromkeys(PER_TOKEN, "token") | dict.fromkeys(PER_PATCH, "patch")
    )
    static = {"grid", "prefix", "proportional"}
    # `group` has an entry for each patch of the image, wherever that is: nothing moves it.
    unmarked = {field.name for field in dataclasses.fields(Tokens)} - static
    assert unmarked - {field.name for field in moving_fields()} == {"group"}


@settings(deadline=None, max_examples=40)
@given(cases())
def test_a_split_takes_every_marked_field_along(case):
    tokens, order, keep = case
    kept, pruned, _, _ = move(*case)
    assert_holds(kept, rows_of(tokens, order[:, :keep], prefix=True))
    assert_holds(pruned, rows_of(tokens, order[:, keep:], prefix=False))
    for part, prefix in ((kept, tokens.prefix), (pruned, 0)):
        assert (part.prefix, part.grid, part.proportional) == (prefix, (1, PATCHES), False)


@settings(deadline=None, max_examples=40)
@given(cases())
def test_another_order_takes_every_marked_field_along(case):
    tokens, order, keep = case
    moved = move(*case)[3]
    assert_holds(moved, rows_of(tokens, order, prefix=True))
    back = np.argsort(order, axis=1).astype(np.int32)
    assert_holds(move(moved, back, keep)[3], values(tokens))


@settings(deadline=None, max_examples=40)
@given(cases())
def test_parts_put_together_have_every_marked_field(case):
    """Kept and pruned tokens in a row are all tokens in the order of the ranking."""
    tokens, order, _ = case
    together = move(*case)[2]
    assert_holds(together, rows_of(tokens, order, prefix=True))
    assert (together.prefix, together.grid) == (tokens.prefix, tokens.grid)


def test_several_parts_stand_in_the_order_given():
    parts = [filled(("policy",), prefix, seed) for seed, prefix in enumerate((1, 0, 0))]
    together = jax.jit(concatenate)(*parts)
    joined = {
        name: np.concatenate([values(part)[name] for part in parts], axis=1)
        for name in ("x", "index", "policy")
    }
    assert_holds(together, joined)


@pytest.mark.parametrize("name", OPTIONAL)
def test_parts_must_have_the_same_fields(name):
    with pytest.raises(ValueError, match=f"with and without '{name}' cannot be concatenated"):
        concatenate(filled(OPTIONAL, 0), filled(set(OPTIONAL) - {name}, 0))


def test_a_group_does_not_survive_what_moves_its_tokens():
    tokens = filled((), 1).replace(group=np.zeros((BATCH, PATCHES), np.int32))
    order = np.tile(np.arange(PATCHES, dtype=np.int32), (BATCH, 1))
    kept, pruned, _, moved = jax.eval_shape(move, tokens, order, 3)
    assert (kept.group, pruned.group, moved.group) == (None, None, None)


def test_coordinates():
    """By the index in the grid, row by row; (0, 0) without a place; a position goes before it."""
    index = jnp.array([[5, 0, -1, 4]])
    tokens = Tokens(jnp.zeros((1, 5, 2)), index, grid=(2, 3), prefix=1)
    found = tokens.coordinates()
    np.testing.assert_array_equal(found, [[[1, 2], [0, 0], [0, 0], [1, 1]]])
    assert found.dtype == jnp.float32 and tokens.patches == 4
    position = jnp.full((1, 4, 2), 0.5)
    np.testing.assert_array_equal(tokens.replace(position=position).coordinates(), position)


def test_what_is_added_to_the_logits_of_keys():
    tokens = Tokens(jnp.zeros((1, 3, 2)), jnp.zeros((1, 3), jnp.int32))
    assert tokens.key_bias() is None
    size, valid = jnp.array([[1.0, 4.0, 2.0]]), jnp.array([[True, True, False]])
    np.testing.assert_allclose(tokens.replace(size=size).key_bias(), np.log(size), rtol=1e-6)
    both = tokens.replace(size=size, valid=valid)
    np.testing.assert_allclose(both.key_bias(), [[0, np.log(4), MASKED]], rtol=1e-6)
    # Sizes may be there for the pooling alone; padding is masked all the same.
    np.testing.assert_array_equal(both.replace(proportional=False).key_bias(), [[0, 0, MASKED]])


def test_tokens_of_a_full_grid():
    x = jnp.zeros((2, 6, 2))
    tokens = from_features(x, (2, 2), 2)
    np.testing.assert_array_equal(tokens.index, [[0, 1, 2, 3], [0, 1, 2, 3]])
    assert tokens.index.dtype == jnp.int32 and (tokens.grid, tokens.prefix) == ((2, 2), 2)
    assert tokens.moving().keys() == {"x", "index"}
    with pytest.raises(ValueError, match="6 tokens do not match 1 prefix tokens and a 2 x 2 grid"):
        from_features(x, (2, 2), 1)


def test_every_patch_gets_the_features_of_its_token():
    x = jnp.array([[[1.0], [2.0]], [[3.0], [4.0]]])
    group = jnp.array([[0, 1, 1], [1, 0, 1]])
    np.testing.assert_array_equal(unmerge(x, group)[..., 0], [[1, 2, 2], [4, 3, 4]])
