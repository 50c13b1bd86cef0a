"""K-Medoids: keeps the tokens that stand best for the others."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cropr_jax.core import routing
from cropr_jax.core.reducer import Context, Pruner, SiteSizes
from cropr_jax.reducers.clusters import assign, first_least, squared_distances
from cropr_jax.tokens import Tokens

VARIANTS = ("paper", "tokenreduction")


def fit(
    distance: Float[Array, "b m m"],
    weights: Float[Array, "b m"],
    count: int,
    iterations: int,
    variant: str,
) -> Int[Array, "b k"]:
    """Positions of the medoids, all different.

    They start at the largest weights. Then every token joins the nearest medoid, and the member of
    a cluster with the least weighted distance to all of its members becomes the medoid.

    Args:
      distance: of all pairs, symmetric; sums go along the first axis, which is the fast one.
      weights: of each token.
      count: k.
      iterations: how often.
      variant: see `KMedoids`.
    """
    medoids = routing.rank(weights)[:, :count]
    for _ in range(iterations):
        cluster = assign(distance, medoids)
        if variant == "paper":
            together = cluster[:, :, None] == cluster[:, None]
            cost = (jnp.where(together, distance, 0.0) * weights[..., None]).sum(1)
        else:
            cost = weights * distance.sum(1)
        member = cluster[..., None] == jnp.arange(count)
        medoids = first_least(jnp.where(member, cost[..., None], jnp.inf), 1)
    return medoids


class KMedoids(Pruner):
    """Weighted K-Medoids of the patch tokens, after the block.

    A token weighs what attention it receives in the block. The medoids stay as they are, in the
    order of their clusters.

    Source: Marin et al., "Token Pooling in Vision Transformers for Image Classification", WACV
    2023, section 4 (weighted K-Medoids).

    Attributes:
      iterations: updates of the medoids; JoakimHaurum/TokenReduction takes 3 too.
      variant: 'paper', or 'tokenreduction' for the update of that code (models/kmedoids.py), which
        takes the member with the least product of its own weight and its distance to all tokens,
        of other clusters too.
    """

    iterations: int = 3
    variant: str = "paper"

    @property
    def needs(self) -> frozenset[str]:
        if self.variant not in VARIANTS:
            raise ValueError(
                f"kmedoids variant: found {self.variant!r}, expected one of {VARIANTS}"
            )
        return frozenset({"col_mean_all"})

    def macs(self, sizes: SiteSizes) -> tuple[int, int]:
        """Distances of all patches, and Q K^T once more for the attention that tokens receive."""
        return 0, (sizes.patches**2 + (sizes.prefix + sizes.patches) ** 2) * sizes.width

    def order(
        self, tokens: Tokens, context: Context, keep: int, train: bool
    ) -> tuple[Int[Array, "b m"], dict[str, Any]]:
        """Medoids in front, the others as they stood; and `cluster` [b, m]."""
        x, weights = jax.lax.stop_gradient(
            (tokens.x[:, tokens.prefix :], context.col_mean_all[:, tokens.prefix :])
        )
        distance = jnp.sqrt(squared_distances(x))
        medoids = fit(distance, weights, keep, self.iterations, self.variant)
        is_medoid = medoids[:, :, None] == jnp.arange(tokens.patches)
        place = jnp.where(is_medoid.any(1), is_medoid.argmax(1), keep)
        order = routing.rank(-place.astype(jnp.float32))
        return order, {"cluster": assign(distance, medoids)}
