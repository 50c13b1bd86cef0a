"""Semantic segmentation: Segmenter's linear head on a Vision Transformer.

Source: Strudel et al., "Segmenter: Transformer for Semantic Segmentation", ICCV 2021, its linear
decoder, as in benbergner/cropr: segm/segmenter.py.

Letters: b batch, h and w patch grid, m = h*w patch tokens, d width, c classes.
"""

from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

from cropr_jax import fusion, routing
from cropr_jax.layers import LayerNorm
from cropr_jax.models.vit import ViT
from cropr_jax.tokens import Tokens


class Segmenter(ViT):
    """A ViT that predicts the class of each patch: norm and linear head, the prefix left out.

    Logits [b, h, w, c] are those of the patch grid, in the order of the image; the task resizes
    them (`cropr_jax.layers.upsample`). `pool` has no meaning here, `num_queries` is h*w: each query
    of a site predicts one patch.
    """

    @property
    def head_norm(self) -> str:
        """EVA-02, whose MLPs are gated, calls it `fc_norm`, a plain ViT `norm`."""
        return "norm" if self.mlp == "gelu" else "fc_norm"

    @property
    def head_inputs(self) -> int:
        patches = self.grid[0] * self.grid[1]
        left = self.schedule.patches(patches)
        return left[-1] if self.fusion == "dtop" and left else patches

    def predict(
        self, tokens: Tokens, pruned: Sequence[Tokens]
    ) -> tuple[Float[Array, "b h w c"], dict[str, jax.Array]]:
        """Logits, and `normed` [b, m, d], which are the `pre_logits`.

        These stand in the order in which `fusion` leaves the tokens; with 'dtop' they are of the
        kept ones alone.
        """
        x = tokens.x[:, tokens.prefix :]
        normed = LayerNorm(dtype=self.dtype, name=self.head_norm)(x)
        predicted = tokens.replace(x=self.project(normed), prefix=0)
        if self.schedule.sites:
            if self.fusion == "dtop":
                predicted = fusion.logit_fusion(predicted, pruned)
            predicted = routing.raster_order(predicted)
        logits = predicted.x.reshape(x.shape[0], *self.grid, -1)
        return logits, {"normed": normed, "pre_logits": normed}
