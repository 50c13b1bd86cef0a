"""Static-shape Top-K routing: rank the patch tokens, split them, put them back.

One `lax.sort` ranks a site and `take_along_axis` applies the ranking. `lax.top_k` is avoided: with
a batch-sharded operand XLA gathers the whole score matrix on every device, a sort stays local.

Letters: b batch, p prefix tokens, m patch tokens, t = p + m, k kept and r removed patch tokens.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from cropr_jax.tokens import Tokens, moving_fields


def rank(scores: Float[Array, "b m"]) -> Int[Array, "b m"]:
    """Positions of the tokens from the highest score to the lowest (the order of Eq. 1).

    Ties keep the order in which the tokens stand. A NaN ranks below every number: a broken token
    is pruned first rather than kept for ever.
    """
    positions = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    _, order = lax.sort((-scores, positions), dimension=1, num_keys=1, is_stable=True)
    return order


def invert(order: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """The inverse of each row's permutation, by a sort (a scatter would communicate)."""
    positions = lax.broadcasted_iota(jnp.int32, order.shape, 1)
    _, inverse = lax.sort((order, positions), dimension=1, num_keys=1)
    return inverse


def take(x: Shaped[Array, "b t *f"], order: Int[Array, "b n"]) -> Shaped[Array, "b n *f"]:
    """Rows of `x` in the given order: `x[i, order[i]]`."""
    indices = order.reshape(order.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, indices, axis=1, mode="promise_in_bounds")


@jax.custom_vjp
def permute(x: Shaped[Array, "b t *f"], order: Int[Array, "b t"]) -> Shaped[Array, "b t *f"]:
    """Rows of `x` in the order of a permutation; the gradient is a gather, not a scatter-add."""
    return take(x, order)


def _permute_fwd(x, order):
    return permute(x, order), order


def _permute_bwd(order, gradient):
    return take(gradient, invert(order)), None


permute.defvjp(_permute_fwd, _permute_bwd)


@jax.custom_vjp
def _divide(x, head, tail):
    return take(x, head), take(x, tail)


def _divide_fwd(x, head, tail):
    return _divide(x, head, tail), jnp.concatenate([head, tail], axis=1)


def _divide_bwd(order, gradients):
    return take(jnp.concatenate(gradients, axis=1), invert(order)), None, None


_divide.defvjp(_divide_fwd, _divide_bwd)


def divide(
    x: Shaped[Array, "b t *f"], order: Int[Array, "b t"], keep: int
) -> tuple[Shaped[Array, "b k *f"], Shaped[Array, "b r *f"]]:
    """The first `keep` rows of the permuted `x`, and the rest.

    Two gathers rather than one that is cut: when one part is unused, XLA drops its gather.
    """
    return _divide(x, order[:, :keep], order[:, keep:])


def split(tokens: Tokens, order: Int[Array, "b m"], keep: int) -> tuple[Tokens, Tokens]:
    """Kept tokens (with the prefix in front) and pruned tokens (without), Eq. 1 and 2.

    Args:
      tokens: p + m tokens.
      order: ranking of the m patch tokens, from `rank`.
      keep: number k of patch tokens to keep; a static int.

    Raises:
      ValueError: if `keep` is not between 0 and m.
    """
    if not 0 <= keep <= tokens.patches:
        raise ValueError(f"cannot keep {keep} of {tokens.patches} patch tokens")
    permutations = _permutations(tokens, order)
    kept, pruned = {}, {}
    for name, value in tokens.moving().items():
        # Rows of a permutation beyond those of the patch tokens are the prefix, which is kept.
        permutation = permutations[name]
        count = permutation.shape[1] - order.shape[1] + keep
        kept[name], pruned[name] = divide(value, permutation, count)
    # Patches of pruned tokens are in no token, which a group cannot say.
    return tokens.replace(**kept, group=None), tokens.replace(**pruned, group=None, prefix=0)


def _permutations(tokens: Tokens, order: Int[Array, "b m"]) -> dict[str, Int[Array, "b _"]]:
    """By field of the tokens, the ranking of its rows; prefix tokens stay in front."""
    prefix = tokens.prefix
    head = jnp.broadcast_to(jnp.arange(prefix, dtype=order.dtype), (order.shape[0], prefix))
    full = jnp.concatenate([head, order + prefix], axis=1)
    per = {"token": full, "patch": order}
    return {field.name: per[field.metadata["per"]] for field in moving_fields()}


def reorder(tokens: Tokens, order: Int[Array, "b m"]) -> Tokens:
    """All patch tokens in another order; the gradient is a gather.

    Args:
      tokens: p + m tokens.
      order: a permutation of the m patch tokens.
    """
    permutations = _permutations(tokens, order)
    moved = {name: permute(value, permutations[name]) for name, value in tokens.moving().items()}
    return tokens.replace(**moved, group=None)


def regroup(tokens: Tokens, destination: Int[Array, "b m"]) -> Int[Array, "b g"]:
    """`Tokens.group` once every patch token has moved into the token at its `destination`."""
    group = invert(tokens.index) if tokens.group is None else tokens.group
    return take(destination, group)


def raster_order(tokens: Tokens) -> Tokens:
    """Patch tokens back in image order, for dense heads: one inverse permutation.

    Raises:
      ValueError: if `tokens` does not hold every patch of its grid.
    """
    height, width = tokens.grid
    if tokens.patches != height * width:
        raise ValueError(
            f"{tokens.patches} patch tokens cannot fill a {height} x {width} grid; "
            "reactivate the pruned ones first (fusion='llf')"
        )
    return reorder(tokens, invert(tokens.index))


def pruned_after(
    kept: Int[Array, "b k"],
    pruned: Sequence[Int[Array, "b _"]],
    blocks: Sequence[int],
    grid: tuple[int, int],
) -> Int[Array, "b h w"]:
    """The map of the block (from 1) after which each patch was pruned; 0 where it was kept.

    Args:
      kept: raster indices of the patches that no site pruned.
      pruned: raster indices of what each site pruned.
      blocks: the block of each site.
      grid: (h, w).
    """
    index = jnp.concatenate([kept, *pruned], axis=1)
    label = jnp.concatenate(
        [jnp.zeros(kept.shape[1:], jnp.int32)]
        + [
            jnp.full(site.shape[1:], block, jnp.int32)
            for site, block in zip(pruned, blocks, strict=True)
        ]
    )
    return take(jnp.broadcast_to(label, index.shape), invert(index)).reshape(-1, *grid)
