"""What a model costs: multiply-accumulates (MACs), tokens and parameters, from its sizes alone.

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
from typing import Any

import jax

from cropr_jax.core import fusion, trees
from cropr_jax.core.reducer import SiteSizes
from cropr_jax.models.params import abstract_params, slim_params
from cropr_jax.models.trunk import Trunk


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


def fusion_macs(model: Trunk, kept: int, patches: int) -> Macs:
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


def site_macs(model: Trunk, tokens: int, after: int) -> Macs:
    """What a site adds at inference (`Reducer.macs`), of `tokens` before and `after` it."""
    sizes = SiteSizes(
        tokens - model.prefix, after - model.prefix, model.prefix, model.width, model.heads
    )
    return Macs(*model.make_reducer().macs(sizes))


def breakdown(model: Trunk) -> dict[str, Macs]:
    """MACs of each part at inference: `patch_embed`, `block_0`, `reducer_0`, `fusion`, `head`.

    The model's own form counts: the slim one, or the full one, whose aggregators and auxiliary
    heads do not run outside training.
    """
    patches = model.patches
    features = 3 * model.patch[0] * model.patch[1]
    parts = {"patch_embed": Macs(patches * features * model.width)}
    for i, (tokens, after) in enumerate(zip(model.block_inputs(), model.mlp_inputs(), strict=True)):
        parts[f"block_{i}"] = block_macs(tokens, model.width, model.hidden, model.mlp, after)
    totals = (patches + model.prefix, *model.schedule.tokens(patches, model.prefix))
    for site, (tokens, after) in enumerate(itertools.pairwise(totals)):
        parts[trees.site_name(site)] = site_macs(model, tokens, after)
    parts["fusion"] = fusion_macs(model, totals[-1], patches)
    parts["head"] = Macs(model.head_macs())
    return parts


def count(model: Trunk) -> Macs:
    """MACs of one image at inference."""
    return sum(breakdown(model).values(), Macs())


def facts(model: Trunk) -> dict[str, Any]:
    """What is told of a model wherever models are told apart.

    Args:
      model: training form; MACs and `params_slim` are those of its slim form.

    Returns:
      `tokens` after every site, `tpr` (total pruning ratio), `params` of the training form,
      `params_slim`, `macs_linear` and `macs_all` of one image.
    """
    params = abstract_params(model)
    slim = jax.eval_shape(lambda tree: slim_params(model, tree), params)
    macs = count(model.clone(slim=True))
    return {
        "tokens": list(model.schedule.tokens(model.patches, model.prefix)),
        "tpr": model.schedule.tpr(model.patches),
        "params": trees.count(params),
        "params_slim": trees.count(slim),
        "macs_linear": macs.linear,
        "macs_all": macs.all,
    }
