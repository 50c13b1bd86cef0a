"""Semantic segmentation: Segmenter's linear head on a Vision Transformer.

Source: Strudel et al., "Segmenter: Transformer for Semantic Segmentation", ICCV 2021, its linear
decoder, as in benbergner/cropr: segm/segmenter.py.

Letters: b batch, h and w patch grid, m = h*w patch tokens, d width, c classes.
"""

import jax
from jaxtyping import Array, Float

from cropr_jax import routing
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
        return self.grid[0] * self.grid[1]

    def predict(self, tokens: Tokens) -> tuple[Float[Array, "b h w c"], dict[str, jax.Array]]:
        """Logits, and `normed` [b, m, d], which are the `pre_logits`, in raster order."""
        if self.schedule.sites:
            tokens = routing.raster_order(tokens)
        patches = tokens.x[:, tokens.prefix :]
        normed = LayerNorm(dtype=self.dtype, name=self.head_norm)(patches)
        logits = self.project(normed)
        logits = logits.reshape(logits.shape[0], *self.grid, -1)
        return logits, {"normed": normed, "pre_logits": normed}
