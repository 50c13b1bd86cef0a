"""Multiply-accumulates (MACs) of a model, counted from its sizes and its schedule.

Two conventions, both in units (not giga) and for one image:
- linear: patch embedding, projections, MLPs and head, without the attention products. The GFLOPs in
  the paper's tables are these.
- all: with the products Q K^T and A V of self-attention. XLA's FLOPs are about twice this number.

Whatever costs a few operations per channel is in neither: norms, activations, gating, rotary
embeddings, pooling, and scores of one dot product a token, as those of the slim Cropr (0.007 % of a
ViT-L).
"""

import dataclasses
import itertools

from cropr_jax import fusion
from cropr_jax.models.vit import ViT
from cropr_jax.reducers.base import SiteSizes


@dataclasses.dataclass(frozen=True)
class Macs:
    """MACs for one image.

    Attributes:
      linear: without the attention products.
      attention: the attention products.
    """

    linear: int = 0
    attention: int = 0

    @property
    def all(self) -> int:
        """Both together."""
        return self.linear + self.attention

    def __add__(self, other: "Macs") -> "Macs":
        return Macs(self.linear + other.linear, self.attention + other.attention)


def block_macs(
    tokens: int,
    width: int,
    hidden: int,
    mlp: str = "gelu",
    mlp_tokens: int | None = None,
    keys: int | None = None,
) -> Macs:
    """A transformer block: four projections, an MLP, and the two attention products.

    A GELU MLP has two kernels, a gated one three. It sees `mlp_tokens` where a site in the middle
    of the block leaves fewer than `tokens`. In cross-attention there are `keys`.
    """
    kernels = 2 if mlp == "gelu" else 3
    after = tokens if mlp_tokens is None else mlp_tokens
    seen = tokens if keys is None else keys
    linear = 2 * (tokens + seen) * width**2 + kernels * after * width * hidden
    return Macs(linear, 2 * tokens * seen * width)


def fusion_macs(model: ViT, kept: int, patches: int) -> Macs:
    """The block that a fusion adds after the last one, and its further projection.

    Args:
      model: with the fusion.
      kept: tokens that leave the last block.
      patches: of the whole image.
    """
    if not model.schedule.sites or model.fusion not in fusion.NEW_BLOCKS:
        return Macs()
    new = fusion.NEW_BLOCKS[model.fusion]
    everything = patches + model.prefix
    learned = issubclass(new, fusion.CrossAttention)
    queries = patches if learned else everything
    keys = kept if learned and not new.sees_pruned else everything
    macs = block_macs(queries, model.width, model.hidden, model.mlp, keys=keys)
    return macs + Macs(patches * model.width**2 * model.extra_proj)


def site_macs(model: ViT, tokens: int, after: int) -> Macs:
    """What a site adds at inference (`Reducer.macs`), of `tokens` before and `after` it."""
    sizes = SiteSizes(
        tokens - model.prefix, after - model.prefix, model.prefix, model.width, model.heads
    )
    return Macs(*model.make_reducer().macs(sizes))


def breakdown(model: ViT) -> dict[str, Macs]:
    """MACs of each part at inference: `patch_embed`, `block_0`, `reducer_0`, `fusion`, `head`.

    The model's own form counts: the slim one, or the full one, whose aggregators and auxiliary
    heads do not run outside training.
    """
    height, width = model.grid
    patches = height * width
    features = 3 * model.patch[0] * model.patch[1]
    parts = {"patch_embed": Macs(patches * features * model.width)}
    for i, (tokens, after) in enumerate(zip(model.block_inputs(), model.mlp_inputs(), strict=True)):
        parts[f"block_{i}"] = block_macs(tokens, model.width, model.hidden, model.mlp, after)
    totals = (patches + model.prefix, *model.schedule.tokens(patches, model.prefix))
    for site, (tokens, after) in enumerate(itertools.pairwise(totals)):
        parts[f"reducer_{site}"] = site_macs(model, tokens, after)
    parts["fusion"] = fusion_macs(model, totals[-1], patches)
    parts["head"] = Macs(model.head_inputs * model.width * model.num_classes)
    return parts


def count(model: ViT) -> Macs:
    """MACs of one image at inference."""
    return sum(breakdown(model).values(), Macs())
