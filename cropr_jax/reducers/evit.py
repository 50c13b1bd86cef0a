"""EViT: keeps the patches that CLS looks at most, and fuses the others into one token."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from cropr_jax.core import routing
from cropr_jax.core.reducer import Context, Reducer
from cropr_jax.tokens import Tokens, concatenate

# Keeps the mean of tokens without any attention finite.
TINY = 1e-12


def fuse(
    x: Float[Array, "b r d"], weights: Float[Array, "b r"], renormalise: bool
) -> Float[Array, "b 1 d"]:
    """Sum of tokens weighted by the attention that they get, in float32."""
    if renormalise:
        weights = weights / (weights.sum(1, keepdims=True) + TINY)
    fused = jnp.einsum(
        "brd,br->bd", x.astype(jnp.float32), weights, precision=jax.lax.Precision.HIGHEST
    )
    return fused[:, None].astype(x.dtype)


class EViT(Reducer):
    """Attentive tokens stay, inattentive ones become one, between attention and MLP.

    The fused token is a patch token like any other from then on: the next site keeps it or fuses it
    again. It counts: of m tokens k - 1 stay beside it, so that R tokens are gone, as with every
    other method. A site that removes nothing does nothing.

    Source: Liang et al., "Not All Patches are What You Need: Expediting Vision Transformers via
    Token Reorganizations", ICLR 2022; youweiliang/evit: evit.py, which counts by a keep rate of the
    current length.

    Attributes:
      fuse: false drops the inattentive tokens: Attn Top-K between attention and MLP.
      renormalise: let the weights of the fused token sum to 1. The paper speaks of a weighted
        average; its code, whose numbers are published, sums with the attention as it is.
    """

    fuse: bool = True
    renormalise: bool = False

    hook: ClassVar[str] = "middle"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"cls_row"})

    @property
    def refuses_fusion(self) -> str:
        return "fuses what it prunes into one token" if self.fuse else ""

    def __call__(
        self, tokens: Tokens, context: Context, *, keep: int, train: bool
    ) -> tuple[Tokens, Tokens | None, dict[str, Any]]:
        """Splits the tokens and fuses the lesser part.

        Args:
          tokens: p + m tokens, after the attention's residual.
          context: with `cls_row`.
          keep: k, patch tokens that leave, the fused one counted; a static int.
          train: unused; the same in training and inference.

        Returns:
          Kept tokens in descending order of attention, the fused token last; None, or the pruned
          tokens with `fuse` off; and `attention` [b, m]. The fused token sends a gradient into its
          tokens and into their attention.
        """
        attention = context.cls_row.mean(1)[:, tokens.prefix :]
        out = {"attention": attention}
        order = routing.rank(jax.lax.stop_gradient(attention))
        if not self.fuse:
            kept, pruned = routing.split(tokens, order, keep)
            return kept, pruned, out
        if keep == tokens.patches:
            return tokens, None, out
        kept, rest = routing.split(tokens, order, keep - 1)
        _, weights = routing.divide(attention, order, keep - 1)
        x = fuse(rest.x, weights, self.renormalise)
        index = jnp.full((x.shape[0], 1), -1, jnp.int32)
        return concatenate(kept, Tokens(x, index, grid=tokens.grid)), None, out
