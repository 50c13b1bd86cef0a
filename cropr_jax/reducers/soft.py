"""What the soft methods share: the outputs are weighted sums over all patch tokens.

Letters: b batch, p prefix tokens, m patch tokens, k outputs, d width.
"""

from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from cropr_jax.core.reducer import Context, Reducer, SiteSizes
from cropr_jax.tokens import Tokens


class SoftReducer(Reducer):
    """Replaces the patch tokens by K learned mixtures of them; the prefix passes by.

    A method is a subclass that defines `mix`, and says in `count_axes` which of its parameters hold
    K in their shapes. No output stands for a place.
    """

    keeps_positions: ClassVar[bool] = False

    def logit_macs(self, sizes: SiteSizes) -> int:
        """MACs of the logits of one patch, by default those of its product with every output."""
        return sizes.width * sizes.keep

    def macs(self, sizes: SiteSizes) -> tuple[int, int]:
        """A logit for each patch in each output, and the mixing."""
        mixing = sizes.patches * sizes.keep * sizes.width
        return sizes.patches * self.logit_macs(sizes), mixing

    def mix(
        self, x: Float[Array, "b m d"], keep: int
    ) -> tuple[Float[Array, "b k m"], Float[Array, "b m d"]]:
        """Float32 weights of every patch token in each of `keep` outputs, and what they weigh."""
        raise NotImplementedError(f"{type(self).__name__} defines no mix")

    def __call__(
        self, tokens: Tokens, context: Context, *, keep: int, train: bool
    ) -> tuple[Tokens, None, dict[str, Any]]:
        """Mixes the tokens.

        Args:
          tokens: p + m tokens.
          context: unused.
          keep: k, outputs; a static int.
          train: unused; the same in training and inference.

        Returns:
          p + k tokens without place, None, and `weights` [b, k, m].
        """
        prefix = tokens.prefix
        weights, values = self.mix(tokens.x[:, prefix:], keep)
        mixed = jnp.einsum("bkm,bmd->bkd", weights.astype(values.dtype), values)
        x = jnp.concatenate([tokens.x[:, :prefix], mixed.astype(tokens.x.dtype)], axis=1)
        index = jnp.full((x.shape[0], keep), -1, jnp.int32)
        made = tokens.replace(x=x, index=index, position=None, size=None, valid=None)
        return made, None, {"weights": weights}
