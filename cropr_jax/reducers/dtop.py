"""DToP: patches of which a head is sure leave early, with its logits."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from cropr_jax.core import routing
from cropr_jax.core.reducer import Context, Pruner, SiteSizes
from cropr_jax.cropr import AuxiliaryHead
from cropr_jax.tokens import Tokens


def doubt(logits: Float[Array, "b m c"]) -> Float[Array, "b m"]:
    """Log odds against the most probable class, in float32: the lower, the surer.

    Ranks as the greatest probability does, but still tells apart what rounds to 1.
    """
    logits = logits.astype(jnp.float32)
    best = jax.nn.one_hot(logits.argmax(-1), logits.shape[-1], dtype=bool)
    others = jax.nn.logsumexp(jnp.where(best, -jnp.inf, logits), axis=-1)
    return others - logits.max(-1)


class DToP(Pruner):
    """Every site predicts the class of all its patches and lets the surest go.

    A fixed number leaves, as with the other methods of the paper's Table "fusion", and all heads
    are a norm and a linear layer; the original has attention heads and a threshold. The heads
    train the backbone too. Each has a loss on the patches that it sees, weight 1, beside that of
    the fused logits (ours: the paper does not say).

    Source: Tang et al., "Dynamic Token Pruning in Plain Vision Transformers for Semantic
    Segmentation", ICCV 2023, in the form of section "Last Layer Fusion (LLF)" of the paper.
    """

    @property
    def describe_losses(self) -> str:
        return "cross-entropy of each site on the patches that are left there"

    def macs(self, sizes: SiteSizes) -> tuple[int, int]:
        """The linear layer, of all patches that enter."""
        return sizes.patches * sizes.width * self.num_outputs, 0

    @nn.compact
    def __call__(
        self, tokens: Tokens, context: Context, *, keep: int, train: bool
    ) -> tuple[Tokens, Tokens, dict[str, Any]]:
        """Splits the tokens.

        Args:
          tokens: p + m tokens.
          context: nothing of it is needed.
          keep: patch tokens that go on; a static int.
          train: whether to return what the loss of the site needs.

        Returns:
          Kept tokens in descending order of doubt; those that leave likewise, with their float32
          logits [b, r, c] as features; `scores` [b, m], the doubt, and in training `auxiliary`
          [b, m, c] and `places` [b, m].
        """
        head = AuxiliaryHead(self.num_outputs, self.dtype, name="auxiliary_head")
        logits = head(tokens.x[:, tokens.prefix :])
        scores = jax.lax.stop_gradient(doubt(logits))
        order = routing.rank(scores)
        kept, gone = routing.split(tokens, order, keep)
        _, exits = routing.divide(logits, order, keep)
        out = {"scores": scores}
        if train:
            out |= {"auxiliary": logits, "places": tokens.index}
        return kept, gone.replace(x=exits), out
