"""What becomes of pruned tokens: reactivation before the head sees the sequence."""

from collections.abc import Sequence

from cropr_jax.tokens import Tokens, concatenate

FUSIONS = ("llf", "none")


def last_layer_fusion(kept: Tokens, pruned: Sequence[Tokens]) -> Tokens:
    """Last Layer Fusion: the tokens that enter the last block.

    The kept tokens, as the block before the last left them, are followed by the tokens of every
    site, as they were when that site pruned them. Global attention needs no particular order;
    `routing.raster_order` restores the image for dense heads after the last block.

    Source: section "Last Layer Fusion (LLF)"; benbergner/cropr: cls/vision_transformer.py.
    """
    return concatenate(kept, *pruned)
