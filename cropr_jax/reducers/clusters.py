"""What the clustering methods share: distances between tokens, and whose cluster a token is in.

Letters: b batch, m tokens, k clusters, d width.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from cropr_jax.core import routing


def squared_distances(x: Float[Array, "b m d"]) -> Float[Array, "b m m"]:
    """Squared Euclidean distances of all pairs in float32; zero on the diagonal, never negative.

    By |x|^2 + |y|^2 - 2 x y, after the mean of the tokens was taken off: what all share is large
    in a residual stream, and would cancel badly.
    """
    x = x.astype(jnp.float32)
    x = x - x.mean(1, keepdims=True)
    square = (x**2).sum(-1)
    product = jnp.einsum("bid,bjd->bij", x, x, precision=jax.lax.Precision.HIGHEST)
    distance = jnp.maximum(square[:, :, None] + square[:, None] - 2 * product, 0)
    return jnp.where(jnp.eye(x.shape[1], dtype=bool), 0.0, distance)


def first_least(values: Float[Array, "b m n"], axis: int) -> Int[Array, "b _"]:
    """Where the least value stands along an axis, the first of equals.

    Two plain reductions: `argmin` is one of pairs, for which XLA's CPU backend has no vector
    instructions; it takes twice as long along the last axis, and more along the others.
    """
    places = jax.lax.broadcasted_iota(jnp.int32, values.shape, axis)
    size = values.shape[axis]
    least = values.min(axis, keepdims=True)
    # Where all are NaN none is least, but the place must be one.
    return jnp.where(values == least, places, size - 1).min(axis)


def assign(distance: Float[Array, "b m m"], centres: Int[Array, "b k"]) -> Int[Array, "b m"]:
    """The nearest centre of every token; each centre is in its own cluster.

    Args:
      distance: of all pairs, or anything that grows with it.
      centres: positions of the centres, all different.
    """
    to_centre = routing.take(distance, centres)
    own = centres[:, :, None] == jnp.arange(distance.shape[1])
    return first_least(jnp.where(own, -1.0, to_centre), 1)


def membership(cluster: Int[Array, "b m"], count: int) -> Bool[Array, "b k m"]:
    """Which tokens are in which of `count` clusters."""
    return cluster[:, None] == jnp.arange(count)[:, None]
