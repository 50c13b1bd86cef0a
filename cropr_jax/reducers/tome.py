"""ToMe: merges the most similar pairs of tokens, without any training."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cropr_jax.core import routing
from cropr_jax.core.reducer import Context, Reducer, SiteSizes
from cropr_jax.tokens import Tokens

HIGHEST = jax.lax.Precision.HIGHEST
# A key of zeros is then similar to nothing, rather than not a number.
TINY = 1e-12


def match(
    metric: Float[Array, "b m c"], removed: int, prefix: int
) -> tuple[Int[Array, "b m"], Int[Array, "b r"]]:
    """Bipartite soft matching of tokens at even places with their best partner at odd ones.

    Places count the prefix, which takes no part. The `removed` even tokens that are most similar
    (by cosine) to their partner merge into it.

    Args:
      metric: what similarity is measured on; ToMe's is the mean of the keys over heads.
      removed: r, at most half of m.
      prefix: p.

    Returns:
      order: positions of the patch tokens: even ones that stay, all odd ones, even ones that merge.
        The first keep the order in which they stood. Without CLS they stand in descending order of
        similarity, as in the released code: what is even at the next site depends on it.
      partner: for each that merges, the place of its partner in `order`.
    """
    unit = metric * jax.lax.rsqrt((metric**2).sum(-1, keepdims=True) + TINY)
    start = prefix % 2
    similarity = jnp.einsum(
        "bec,boc->beo", unit[:, start::2], unit[:, 1 - start :: 2], precision=HIGHEST
    )
    evens, odds = similarity.shape[1:]
    ranking = routing.rank(similarity.max(-1))
    merging, staying = ranking[:, :removed], ranking[:, removed:]
    if prefix:
        staying = jnp.sort(staying, axis=1)
    odd = jnp.broadcast_to(jnp.arange(odds, dtype=jnp.int32), (metric.shape[0], odds))
    order = [2 * staying + start, 2 * odd + 1 - start, 2 * merging + start]
    partner = routing.take(similarity.argmax(-1).astype(jnp.int32), merging)
    return jnp.concatenate(order, axis=1), partner + (evens - removed)


def merge(
    x: Float[Array, "b m f"],
    size: Float[Array, "b m"],
    order: Int[Array, "b m"],
    partner: Int[Array, "b r"],
) -> tuple[Float[Array, "b k f"], Float[Array, "b k"]]:
    """Means of merged tokens weighted by size, in float32, and the new sizes.

    The sum of size * x is what it was. A product with a matrix of ones and zeros: a scatter-add
    would add in any order, and is slow where several tokens meet.

    Args:
      x: patch tokens.
      size: of each.
      order, partner: from `match`.
    """
    kept = x.shape[1] - partner.shape[1]
    into = (partner[:, None] == jnp.arange(kept)[:, None]).astype(jnp.float32)
    size, added = routing.divide(size, order, kept)
    total, other = routing.divide(x.astype(jnp.float32), order, kept)
    new = size + jnp.einsum("bkr,br->bk", into, added, precision=HIGHEST)
    total = total * size[..., None]
    total += jnp.einsum("bkr,brf->bkf", into, other * added[..., None], precision=HIGHEST)
    return total / new[..., None], new


class ToMe(Reducer):
    """Token Merging, between attention and MLP.

    Off the shelf it needs no training. A token that stands for s patches counts s times in every
    later attention (proportional attention), and in pool='mean_size_weighted'.

    Source: Bolya et al., "Token Merging: Your ViT But Faster", ICLR 2023; facebookresearch/ToMe:
    tome/merge.py, tome/patch/timm.py, which merges after the last block's attention too. Here the
    schedule says where, the same blocks for every method; the last block would only save its MLP.

    Attributes:
      proportional: count tokens by size in attention. On for models that were trained without
        masking, and for all that are trained with ToMe; off for MAE models off the shelf.
    """

    proportional: bool = True

    hook: ClassVar[str] = "middle"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"k_mean"})

    @property
    def refuses_fusion(self) -> str:
        return "merges tokens instead of pruning them"

    def most(self, patches: int) -> int:
        """Half of them: only tokens at even places merge."""
        return patches // 2

    def macs(self, sizes: SiteSizes) -> tuple[int, int]:
        """Half of the patches with the other half, in the width of a head."""
        return 0, sizes.patches**2 // 4 * (sizes.width // sizes.heads)

    def __call__(
        self, tokens: Tokens, context: Context, *, keep: int, train: bool
    ) -> tuple[Tokens, None, dict[str, Any]]:
        """Merges m - k pairs.

        Args:
          tokens: p + m tokens, after the attention's residual.
          context: with `k_mean`.
          keep: k, patch tokens that leave, at least half of m; a static int.
          train: unused; the same in training and inference.

        Returns:
          Even tokens that stay, then all odd ones, with `size`, mean `position` and `group`; None;
          and no outputs.
        """
        if keep == tokens.patches:
            return tokens, None, {}
        prefix = tokens.prefix
        order, partner = match(context.k_mean[:, prefix:], tokens.patches - keep, prefix)
        size = jnp.ones(tokens.x.shape[:2], jnp.float32) if tokens.size is None else tokens.size
        x, new_size = merge(tokens.x[:, prefix:], size[:, prefix:], order, partner)
        position, _ = merge(tokens.coordinates(), size[:, prefix:], order, partner)

        before, _ = routing.divide(size[:, prefix:], order, keep)
        index, _ = routing.divide(tokens.index, order, keep)
        places = jnp.broadcast_to(jnp.arange(keep, dtype=jnp.int32), (x.shape[0], keep))
        destination = routing.take(
            jnp.concatenate([places, partner], axis=1), routing.invert(order)
        )
        merged = tokens.replace(
            x=jnp.concatenate([tokens.x[:, :prefix], x.astype(tokens.x.dtype)], axis=1),
            index=jnp.where(new_size > before, -1, index),
            position=position,
            size=jnp.concatenate([size[:, :prefix], new_size], axis=1),
            group=routing.regroup(tokens, destination),
            proportional=self.proportional,
        )
        return merged, None, {}
