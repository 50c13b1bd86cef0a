"""Random keys, one for every example: what a batch is cut into then changes no number."""

import jax
from jaxtyping import Array, Float, Int, Key


def example_keys(key: Key[Array, ""], step: int | Int[Array, ""], ids: Int[Array, "b"]):
    """Keys [b] that depend on the seed, the training step and each example's id alone.

    Args:
      key: the key of the run, `jax.random.key(seed)`.
      step: training step.
      ids: the examples' indices in their data set.
    """
    key = jax.random.fold_in(key, step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, ids)


def fold(keys: Key[Array, "b"], data: int) -> Key[Array, "b"]:
    """Keys for one more purpose, numbered `data`."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, data)


def uniform(keys: Key[Array, "b"], shape: tuple[int, ...]) -> Float[Array, "b ..."]:
    """Uniform numbers in [0, 1), `shape` of them from each key."""
    return jax.vmap(lambda key: jax.random.uniform(key, shape))(keys)


def gumbel(keys: Key[Array, "b"], shape: tuple[int, ...]) -> Float[Array, "b ..."]:
    """Standard Gumbel noise, `shape` of it from each key."""
    return jax.vmap(lambda key: jax.random.gumbel(key, shape))(keys)
