"""What becomes of pruned tokens: how they come back before the head sees the sequence.

| name | where | pruned tokens |
| --- | --- | --- |
| 'llf' | before the last block | take part in it |
| 'token_concat' | after the last block | stay as they were pruned |
| 'cross_attn' | a new block after it, queries of the grid | are never seen again |
| 'cross_attn_concat' | the same | are keys and values of the new block |
| 'mhsa_concat' | a new block after it, self-attention | take part in it |
| 'dtop' | after the head | left with the logits of their site's own head |
| 'none' | | are gone |

Source: Table "fusion" of the paper. It names the rivals of Last Layer Fusion; what it leaves open
of them is said where it is decided.

Letters: b batch, m = h*w patch tokens, p prefix tokens, d width.
"""

from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn

from cropr_jax.core.layers import Dtype, xavier_init
from cropr_jax.tokens import Tokens, concatenate, from_features

# For a head that predicts at every patch, and for one that predicts the class of the image.
DENSE_FUSIONS = ("llf", "cross_attn", "token_concat", "cross_attn_concat", "mhsa_concat", "dtop")
POOLED_FUSIONS = ("llf", "none")
FUSIONS = (*DENSE_FUSIONS, "none")


def last_layer_fusion(kept: Tokens, pruned: Sequence[Tokens]) -> Tokens:
    """Last Layer Fusion: the tokens that enter the last block.

    The kept tokens, as the block before the last left them, are followed by the tokens of every
    site, as they were when that site pruned them. Global attention needs no particular order;
    `routing.raster_order` restores the image for dense heads after the last block.

    Source: section "Last Layer Fusion (LLF)"; benbergner/cropr: cls/vision_transformer.py.
    """
    return concatenate(kept, *pruned)


def token_concat(kept: Tokens, pruned: Sequence[Tokens]) -> Tokens:
    """Token Concat: the kept tokens after the last block, and the pruned ones as they left.

    A pruned token influences nothing but the prediction at its own place.
    """
    return concatenate(kept, *pruned)


def logit_fusion(predicted: Tokens, exits: Sequence[Tokens]) -> Tokens:
    """DToP's fusion: the head's logits of the kept patches, and those with which others left.

    Args:
      predicted: logits of the kept patches as features, without prefix.
      exits: of every site likewise (`cropr_jax.reducers.dtop`).
    """
    return concatenate(predicted, *exits)


class NewBlock(nn.Module):
    """A transformer block after the last one, trained from scratch.

    Attributes:
      block: like those of the backbone.
      extra_proj: one more linear layer, [d, d], on the full grid. The paper does not speak of it,
        but its parameters and GFLOPs come out with it alone. It stands after the block.
      dtype: compute dtype.
    """

    block: nn.Module
    extra_proj: bool = True
    dtype: Dtype = jnp.float32

    def finish(self, tokens: Tokens) -> Tokens:
        """The patch tokens of the full grid under the further projection."""
        x = tokens.x[:, tokens.prefix :]
        if self.extra_proj:
            dense = nn.Dense(x.shape[-1], dtype=self.dtype, kernel_init=xavier_init, name="proj")
            x = dense(x)
        return tokens.replace(x=x, prefix=0)


class CrossAttention(NewBlock):
    """Cross-Attn: learned queries, one a patch, look at the kept tokens.

    Queries start as a normal of std 0.02 and are turned by the place of their patch where the
    backbone has rotary embeddings. Keys and values have a norm of their own.
    """

    sees_pruned: ClassVar[bool] = False

    @nn.compact
    def __call__(self, kept: Tokens, pruned: Sequence[Tokens]) -> Tokens:
        """The patch tokens of the full grid, in raster order."""
        height, width = kept.grid
        init = nn.initializers.truncated_normal(0.02)
        queries = self.param("queries", init, (height * width, kept.x.shape[-1]))
        x = jnp.broadcast_to(queries.astype(self.dtype), (kept.x.shape[0], *queries.shape))
        seen = concatenate(kept, *pruned) if self.sees_pruned else kept
        tokens = from_features(x, kept.grid, prefix=0)
        tokens, _ = self.block.attend(tokens, None, seen)
        return self.finish(self.block.feed_forward(tokens, None))


class CrossAttentionConcat(CrossAttention):
    """Cross-Attn + Concat: the queries look at all tokens, the pruned ones as they left."""

    sees_pruned: ClassVar[bool] = True


class SelfAttentionConcat(NewBlock):
    """MHSA + Concat: a new block over the kept tokens and the pruned ones as they left."""

    @nn.compact
    def __call__(self, kept: Tokens, pruned: Sequence[Tokens]) -> Tokens:
        """All patch tokens, in the order of `token_concat`."""
        tokens, _ = self.block.attend(token_concat(kept, pruned), None)
        return self.finish(self.block.feed_forward(tokens, None))


NEW_BLOCKS: dict[str, type[NewBlock]] = {
    "cross_attn": CrossAttention,
    "cross_attn_concat": CrossAttentionConcat,
    "mhsa_concat": SelfAttentionConcat,
}
