"""ATS: samples patches where attention is dense, as many as an image needs within a budget."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from cropr_jax.core import routing
from cropr_jax.core.reducer import Context, Reducer
from cropr_jax.tokens import Tokens

VARIANTS = ("paper", "tokenreduction")
TINY = 1e-12


def significance(
    cls_row: Float[Array, "b h t"], v_norm: Float[Array, "b h t"], prefix: int
) -> Float[Array, "b m"]:
    """Share of each patch token: attention of CLS times norm of the value, summed over heads."""
    scores = (cls_row * v_norm).sum(1)[:, prefix:]
    return scores / (scores.sum(1, keepdims=True) + TINY)


def levels(count: int, variant: str) -> Float[np.ndarray, "k"]:
    """Where the cumulative distribution is inverted: (2 k - 1) / (2 K), k = 1 .. K.

    JoakimHaurum/TokenReduction counts CLS in K but not in k, so it leaves the highest level out.
    """
    total = count if variant == "paper" else count + 1
    return np.arange(0.5, count, dtype=np.float32) / np.float32(total)


def invert_cdf(
    cdf: Float[Array, "b m"],
    valid: Bool[Array, "b m"],
    at: Float[Array, "k"] | Float[np.ndarray, "k"],
    variant: str,
) -> Int[Array, "b k"]:
    """The token at each level, in ascending order.

    Args:
      cdf: cumulative significance of the tokens in the order in which they stand.
      valid: false for padding, which is never chosen.
      at: levels.
      variant: 'paper' takes the first token whose cumulative significance reaches the level,
        'tokenreduction' the one whose is nearest, the first of equals.
    """
    if variant == "paper":
        first = (cdf[:, None] < at[None, :, None]).sum(-1)
        # Rounding may leave the last sum below the last level.
        return jnp.minimum(first, valid.sum(1, keepdims=True) - 1)
    distance = jnp.abs(cdf[:, None] - at[None, :, None])
    return jnp.where(valid[:, None], distance, jnp.inf).argmin(-1)


class ATS(Reducer):
    """Adaptive Token Sampling, between attention and MLP.

    A token that several levels hit stays once, so of k places some are padding, differently many
    for each image. Padding stands behind the tokens that were chosen, with `valid` false: later
    attention does not see it, nor does the pooling. The cost is that of k tokens.

    Source: Fayyaz et al., "Adaptive Token Sampling for Efficient Vision Transformers", ECCV 2022,
    section 3.1, without its stochastic levels. The authors' code (adaptivetokensampling/ATS) sorts
    by score first and fails for budgets below the number of tokens.

    Attributes:
      variant: 'paper', or 'tokenreduction' for the levels and the inverse of
        JoakimHaurum/TokenReduction: models/ats.py (see `levels`, `invert_cdf`).
    """

    variant: str = "paper"

    hook: ClassVar[str] = "middle"

    @property
    def needs(self) -> frozenset[str]:
        if self.variant not in VARIANTS:
            raise ValueError(f"ats variant: found {self.variant!r}, expected one of {VARIANTS}")
        return frozenset({"cls_row", "v_norm"})

    @property
    def refuses_fusion(self) -> str:
        return "prunes another number of tokens in every image"

    def __call__(
        self, tokens: Tokens, context: Context, *, keep: int, train: bool
    ) -> tuple[Tokens, None, dict[str, Any]]:
        """Samples the tokens.

        Args:
          tokens: p + m tokens, after the attention's residual.
          context: with `cls_row` and `v_norm`.
          keep: k, the budget of patch tokens; a static int.
          train: unused; the same in training and inference.

        Returns:
          p + k tokens, chosen ones in the order in which they stood, then padding (index -1);
          None; and `multiplicity` [b, m], how many levels hit each token.
        """
        prefix, batch = tokens.prefix, tokens.x.shape[0]
        valid = jnp.ones((batch, tokens.patches), bool)
        if tokens.valid is not None:
            valid = tokens.valid[:, prefix:]
        scores = jax.lax.stop_gradient(significance(context.cls_row, context.v_norm, prefix))
        at = levels(keep, self.variant)
        chosen = invert_cdf(jnp.cumsum(scores, 1), valid, at, self.variant)
        multiplicity = (chosen[:, :, None] == jnp.arange(tokens.patches)).sum(1)

        # A stable ranking of chosen and not chosen: a permutation, whose gradient is a gather.
        order = routing.rank((multiplicity > 0).astype(jnp.float32))
        kept, _ = routing.split(tokens, order, keep)
        count = (multiplicity > 0).sum(1, keepdims=True)
        valid = jnp.arange(keep) < count
        kept = kept.replace(
            index=jnp.where(valid, kept.index, -1),
            valid=jnp.pad(valid, ((0, 0), (prefix, 0)), constant_values=True),
        )
        return kept, None, {"multiplicity": multiplicity}
