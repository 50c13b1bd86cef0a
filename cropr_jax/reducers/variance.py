"""Variance pruning: flat patches go first."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from cropr_jax.core import routing
from cropr_jax.core.reducer import Context, Pruner
from cropr_jax.tokens import Tokens


def pixel_variance(pixels: Float[Array, "b m f"], channels: int = 3) -> Float[Array, "b m"]:
    """Population variance of each patch's pixels, averaged over the colour channels.

    Args:
      pixels: patches of the model input, each flattened with its channels last.
      channels: colour channels.
    """
    values = pixels.astype(jnp.float32).reshape(*pixels.shape[:2], -1, channels)
    return values.var(2).mean(-1)


class Variance(Pruner):
    """Keeps the patches of the highest pixel variance (Minderer et al. 2024, OWLv2).

    The score depends on the image alone, so every site ranks by the same numbers.
    """

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"pixels"})

    def score(self, tokens: Tokens, context: Context, train: bool):
        return routing.take(pixel_variance(context.pixels), tokens.index), {}
