"""Attn Top-K: keeps the patches that self-attention looks at most."""

from cropr_jax.core.reducer import Context, Pruner, SiteSizes
from cropr_jax.tokens import Tokens

SOURCES = ("cls_row", "col_mean", "col_mean_all")
PLACEMENTS = ("after", "middle")


class AttnTopK(Pruner):
    """Ranks patches by the self-attention of the block just before the site.

    Haurum et al., "Which Tokens to Use?", ICCV 2023, whose code (JoakimHaurum/TokenReduction:
    models/topk.py) prunes between attention and MLP; here it prunes after the block, side by side
    with Cropr.

    Attributes:
      source: 'cls_row' for the CLS token's attention averaged over heads; 'col_mean' for the mean
        attention that a patch receives from all patches (segmentation, detection), 'col_mean_all'
        for that from all tokens.
      inverse: keep the least attended patches instead, a control that shows what the ranking is
        worth.
      placement: 'after' the block, or in its 'middle' as that code. Without fusion the result is
        the same, and the middle saves the MLP of what is pruned.
    """

    source: str = "cls_row"
    inverse: bool = False
    placement: str = "after"

    @property
    def hook(self) -> str:
        return self.placement

    @property
    def needs(self) -> frozenset[str]:
        for field, allowed in (("source", SOURCES), ("placement", PLACEMENTS)):
            if getattr(self, field) not in allowed:
                raise ValueError(
                    f"attn_topk {field}: found {getattr(self, field)!r}, expected one of {allowed}"
                )
        return frozenset({self.source})

    def macs(self, sizes: SiteSizes) -> tuple[int, int]:
        """Q K^T once more for the queries that vote, unless that is CLS alone."""
        if self.source == "cls_row":
            return 0, 0
        tokens = sizes.prefix + sizes.patches
        queries = sizes.patches if self.source == "col_mean" else tokens
        return 0, queries * tokens * sizes.width

    def score(self, tokens: Tokens, context: Context, train: bool):
        received = getattr(context, self.source)
        scores = (received.mean(1) if self.source == "cls_row" else received)[:, tokens.prefix :]
        return -scores if self.inverse else scores, {}
