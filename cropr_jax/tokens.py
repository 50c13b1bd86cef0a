"""`Tokens`, the one struct that goes through the whole network.

Letters: b batch, p prefix tokens (CLS; p >= 0), m patch tokens, d width, h and w patch grid.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

# Fields are not annotated with shapes: a pytree is also built from shardings, `ShapeDtypeStruct`s
# and other leaves that are no arrays.
Leaf = Any

# Marks of fields with an entry for each token (prefix tokens first), or for each patch token: all
# that moves tokens goes by them.
PER_TOKEN, PER_PATCH = {"per": "token"}, {"per": "patch"}

# Added to the attention logits of padding. Finite: a row of -inf alone would turn into NaN.
MASKED = -1e9


@struct.dataclass
class Tokens:
    """Features of a batch of images together with all that a later stage must know about them.

    Attributes:
      x: [b, p+m, d] features in the compute dtype; prefix tokens stand first, never routed.
      index: [b, m] int32 raster position of each patch token in the full h x w grid; -1 where a
        token is no single patch (fused, merged).
      position: [b, m, 2] float32 row and column of tokens that a method has moved (merging), or
        None: those of `index`. Read them through `coordinates`.
      size: [b, p+m] float32, how many patches a token stands for (merging methods), or None: one.
      valid: [b, p+m] bool, false for the padding of budgeted methods, or None: all are valid.
      group: [b, h*w] int32, which of the m patch tokens holds each patch of the image (merging
        methods), or None.
      policy: [b, p+m] float32, 0 for tokens that a method hides from all others instead of removing
        them, so that it can learn from them, 1 for the rest; or None.
      grid: (h, w) of the full patch grid; static.
      prefix: p; static.
      proportional: whether self-attention counts a token as often as `size` says; static.
    """

    x: Leaf = struct.field(metadata=PER_TOKEN)
    index: Leaf = struct.field(metadata=PER_PATCH)
    position: Leaf = struct.field(metadata=PER_PATCH, default=None)
    size: Leaf = struct.field(metadata=PER_TOKEN, default=None)
    valid: Leaf = struct.field(metadata=PER_TOKEN, default=None)
    group: Leaf = None
    policy: Leaf = struct.field(metadata=PER_TOKEN, default=None)
    grid: tuple[int, int] = struct.field(pytree_node=False, default=(0, 0))
    prefix: int = struct.field(pytree_node=False, default=0)
    proportional: bool = struct.field(pytree_node=False, default=True)

    def moving(self) -> dict[str, jax.Array]:
        """Fields with an entry for each token or patch token, those that are None left out."""
        named = {field.name: getattr(self, field.name) for field in moving_fields()}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def patches(self) -> int:
        """m, the number of patch tokens."""
        return self.x.shape[-2] - self.prefix

    def coordinates(self) -> Float[Array, "b m 2"]:
        """Row and column of each patch token in the full grid, for rotary embeddings.

        A token of no place (index -1, no position) gets (0, 0), which turns it as little as CLS.
        """
        if self.position is not None:
            return self.position
        place = jnp.maximum(self.index, 0)
        width = self.grid[1]
        return jnp.stack([place // width, place % width], axis=-1).astype(jnp.float32)

    def key_bias(self) -> Float[Array, "b t"] | None:
        """What self-attention adds to the logits of each token as a key; None for nothing.

        The log of the size makes a token weigh as much as that many equal ones (proportional
        attention: Bolya et al. 2023, Eq. 1). Padding is masked.
        """
        bias = None
        if self.size is not None and self.proportional:
            bias = jnp.log(self.size)
        if self.valid is not None:
            bias = jnp.where(self.valid, 0.0 if bias is None else bias, MASKED)
        return bias


@functools.cache
def moving_fields() -> tuple[dataclasses.Field, ...]:
    """Fields of `Tokens` with an entry for each token or patch token."""
    return tuple(field for field in dataclasses.fields(Tokens) if "per" in field.metadata)


def unmerge(x: Float[Array, "b m d"], group: Int[Array, "b g"]) -> Float[Array, "b g d"]:
    """Features of every patch of the image: those of the token that holds it.

    Args:
      x: patch tokens, without the prefix.
      group: `Tokens.group`.
    """
    return jnp.take_along_axis(x, group[:, :, None], axis=1)


def from_features(x: Float[Array, "b t d"], grid: tuple[int, int], prefix: int) -> Tokens:
    """Tokens of a full grid in raster order.

    Args:
      x: prefix tokens followed by the h*w patch tokens.
      grid: (h, w).
      prefix: number of prefix tokens.

    Raises:
      ValueError: if `x` does not hold prefix + h*w tokens.
    """
    height, width = grid
    if x.shape[1] != prefix + height * width:
        raise ValueError(
            f"{x.shape[1]} tokens do not match {prefix} prefix tokens and a {height} x {width} grid"
        )
    index = jnp.broadcast_to(
        jnp.arange(height * width, dtype=jnp.int32), (x.shape[0], height * width)
    )
    return Tokens(x=x, index=index, grid=grid, prefix=prefix)


def concatenate(first: Tokens, *others: Tokens) -> Tokens:
    """Tokens of `first` followed by the patch tokens of `others`, which carry no prefix.

    Raises:
      ValueError: if one of `others` has prefix tokens or lacks a field that `first` has.
    """
    if any(other.prefix for other in others):
        raise ValueError("only the first of concatenated tokens may carry prefix tokens")

    parts = (first, *others)

    def join(name: str) -> jax.Array | None:
        values = [getattr(part, name) for part in parts]
        if all(value is None for value in values):
            return None
        if any(value is None for value in values):
            raise ValueError(f"tokens with and without {name!r} cannot be concatenated")
        return jnp.concatenate(values, axis=1)

    return first.replace(**{field.name: join(field.name) for field in moving_fields()})
