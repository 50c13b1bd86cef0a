"""Attn Top-K: keeps the patches that self-attention looks at most."""

from cropr_jax.reducers.base import Context, Pruner, SiteSizes
from cropr_jax.tokens import Tokens

SOURCES = ("cls_row", "col_mean")


class AttnTopK(Pruner):
    """Ranks patches by the self-attention of the block just before the site.

    Haurum et al., "Which Tokens to Use?", ICCV 2023, whose code (JoakimHaurum/TokenReduction:
    models/topk.py) prunes between attention and MLP; here it prunes after the block, side by side
    with Cropr.

    Attributes:
      source: 'cls_row' for the CLS token's attention averaged over heads; 'col_mean' for the mean
        attention that a patch receives from all patches (segmentation, detection).
      inverse: keep the least attended patches instead, a control that shows what the ranking is
        worth.
    """

    source: str = "cls_row"
    inverse: bool = False

    @property
    def needs(self) -> frozenset[str]:
        if self.source not in SOURCES:
            raise ValueError(f"attn_topk source: found {self.source!r}, expected one of {SOURCES}")
        return frozenset({self.source})

    def macs(self, sizes: SiteSizes) -> tuple[int, int]:
        """Q K^T once more for the queries that are patches, if all of them vote."""
        if self.source == "cls_row":
            return 0, 0
        return 0, sizes.patches * (sizes.prefix + sizes.patches) * sizes.width

    def score(self, tokens: Tokens, context: Context, train: bool):
        received = context.cls_row.mean(1) if self.source == "cls_row" else context.col_mean
        scores = received[:, tokens.prefix :]
        return -scores if self.inverse else scores, {}
