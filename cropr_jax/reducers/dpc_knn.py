"""DPC-KNN: clusters tokens around density peaks and averages each cluster."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from cropr_jax.core import routing
from cropr_jax.core.layers import normal_init
from cropr_jax.core.reducer import Context, Reducer, SiteSizes
from cropr_jax.host.schema import Kind, whole
from cropr_jax.reducers.clusters import assign, first_least, membership, squared_distances
from cropr_jax.tokens import Tokens

# Added to the total weight of a cluster, as released: clusters of next to no weight fade.
SMALL = 1e-6


def mean_of_smallest(values: Float[Array, "b m n"], count: int) -> Float[Array, "b m"]:
    """Mean of the `count` smallest values of each row.

    By as many passes: few are asked for, and a sort of every row costs more.
    """
    places, total = jnp.arange(values.shape[-1]), jnp.zeros(values.shape[:-1])
    for _ in range(count):
        total += values.min(-1)
        values = jnp.where(first_least(values, 2)[..., None] == places, jnp.inf, values)
    return total / count


def cluster_weights(
    logits: Float[Array, "b m"], member: Bool[Array, "b k m"]
) -> Float[Array, "b k m"]:
    """exp(g) over its sum in each cluster, in logarithms, so that large g do not overflow."""
    inside = jnp.where(member, logits[:, None], -jnp.inf)
    total = jnp.logaddexp(jax.nn.logsumexp(inside, axis=-1, keepdims=True), jnp.log(SMALL))
    return jnp.exp(inside - total)


def density_peaks(
    distance: Float[Array, "b m m"], count: int, neighbours: int
) -> Int[Array, "b k"]:
    """Positions of the centres: tokens that are dense and far from any denser one.

    The density of a token is exp(-mean of the squared distances to its nearest neighbours), itself
    among them; its other virtue is the distance to the nearest denser token, or for the densest the
    largest distance of all. Centres have the largest products. In logarithms: for wide features the
    density would underflow to 0, and chance would choose. Of equal densities the first counts as
    the denser one.

    Args:
      distance: squared distances over the width.
      count: k.
      neighbours: how many make the density.
    """
    log_density = -mean_of_smallest(distance, min(neighbours, distance.shape[1]))
    mine, other = log_density[:, :, None], log_density[:, None]
    places = jnp.arange(distance.shape[1])
    denser = (other > mine) | ((other == mine) & (places < places[:, None]))
    to_denser = jnp.where(denser, distance, jnp.inf).min(-1)
    to_denser = jnp.where(denser.any(-1), to_denser, distance.max((1, 2))[:, None])
    return routing.rank(log_density + 0.5 * jnp.log(to_denser))[:, :count]


class DPCKNN(Reducer):
    """Clusters of patch tokens, each averaged, after the block.

    Source: Zeng et al., "Not All Tokens Are Equal: Human-centric Visual Analysis via Token
    Clustering Transformer", CVPR 2022, as JoakimHaurum/TokenReduction: models/dpcknn.py uses it in
    a plain ViT: without TCFormer's convolution, norm and attention of merged to unmerged tokens.
    Ties are broken by place, not by noise.

    Attributes:
      neighbours: how many make the density of a token.
      equal_weight: plain means, instead of weights exp(g(x)) with g a learned linear map.
    """

    neighbours: int = 5
    equal_weight: bool = False

    hook: ClassVar[str] = "after"
    untrained: ClassVar[Mapping[str, Any]] = {"equal_weight": True}
    ranges: ClassVar[Mapping[str, Kind]] = {"neighbours": whole(1, 2**20)}

    @property
    def refuses_fusion(self) -> str:
        return "merges tokens instead of pruning them"

    def macs(self, sizes: SiteSizes) -> tuple[int, int]:
        """Distances of all patches from all others."""
        return 0, sizes.patches**2 * sizes.width

    @nn.compact
    def __call__(
        self, tokens: Tokens, context: Context, *, keep: int, train: bool
    ) -> tuple[Tokens, None, dict[str, Any]]:
        """Clusters the tokens.

        Args:
          tokens: p + m tokens.
          context: unused.
          keep: k, clusters; a static int.
          train: unused; the same in training and inference.

        Returns:
          p + k tokens in descending order of their centres' merit, with mean `position` and
          `group`; None; and `centres` [b, k], `cluster` [b, m]. The clustering sends no gradient.
        """
        prefix = tokens.prefix
        x = tokens.x[:, prefix:].astype(jnp.float32)
        distance = squared_distances(jax.lax.stop_gradient(x)) / x.shape[-1]
        centres = density_peaks(distance, keep, self.neighbours)
        cluster = assign(distance, centres)
        member = membership(cluster, keep)

        logits = jnp.zeros(x.shape[:2])
        if not self.equal_weight:
            logits = nn.Dense(1, kernel_init=normal_init, name="score")(x)[..., 0]

        mix = functools.partial(jnp.einsum, "bkm,bmf->bkf", precision=jax.lax.Precision.HIGHEST)
        mixed = mix(cluster_weights(logits, member), x).astype(tokens.x.dtype)
        count = member.sum(-1)
        merged = tokens.replace(
            x=jnp.concatenate([tokens.x[:, :prefix], mixed], axis=1),
            index=jnp.where(count == 1, routing.take(tokens.index, centres), -1),
            position=mix(member.astype(jnp.float32), tokens.coordinates()) / count[..., None],
            group=routing.regroup(tokens, cluster),
        )
        return merged, None, {"centres": centres, "cluster": cluster}
