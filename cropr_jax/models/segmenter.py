"""Semantic segmentation: Segmenter's linear head on a Vision Transformer.

Source: Strudel et al., "Segmenter: Transformer for Semantic Segmentation", ICCV 2021, its linear
decoder, as in benbergner/cropr: segm/segmenter.py.

Letters: b batch, h and w patch grid, m = h*w patch tokens, d width, c classes.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import linen as nn
from jaxtyping import Array, Float, Key

from cropr_jax.core import fusion, routing
from cropr_jax.core.layers import LayerNorm
from cropr_jax.errors import ConfigError
from cropr_jax.models.trunk import Encoded, Trunk


class Segmenter(Trunk):
    """A Vision Transformer that predicts the class of each patch: norm and linear head.

    Logits [b, h, w, c] are those of the patch grid, in the order of the image, the prefix left out;
    the task resizes them (`cropr_jax.core.layers.upsample`). `num_queries` is h*w: each query of a
    site predicts one patch.
    """

    fusions: ClassVar[tuple[str, ...]] = fusion.DENSE_FUSIONS
    dense: ClassVar[bool] = True

    @classmethod
    def check(cls, fields: dict[str, Any], grid: tuple[int, int]) -> None:
        patches = grid[0] * grid[1]
        if fields.setdefault("num_queries", patches) != patches:
            raise ConfigError(
                f"config.model.num_queries: found {fields['num_queries']}, but with "
                f"head='segmentation' each query predicts one of the {patches} patches; leave it "
                "out"
            )

    @property
    def head_norm(self) -> str:
        """EVA-02, whose MLPs are gated, calls it `fc_norm`, a plain ViT `norm`."""
        return "norm" if self.mlp == "gelu" else "fc_norm"

    @nn.nowrap
    def head_macs(self) -> int:
        left = self.schedule.patches(self.patches)
        seen = left[-1] if self.fusion == "dtop" and left else self.patches
        return seen * self.width * self.num_classes

    def predict(
        self,
        encoded: Encoded,
        inputs: Mapping[str, jax.Array],
        *,
        train: bool,
        keys: Key[Array, "b"] | None,
    ) -> tuple[Float[Array, "b h w c"], dict[str, jax.Array]]:
        """Logits, and `normed` [b, m, d], which are the `pre_logits`.

        These stand in the order in which `fusion` leaves the tokens; with 'dtop' they are of the
        kept ones alone.
        """
        tokens = encoded.tokens
        x = tokens.x[:, tokens.prefix :]
        normed = LayerNorm(dtype=self.dtype, name=self.head_norm)(x)
        predicted = tokens.replace(x=self.project(normed), prefix=0)
        if self.schedule.sites:
            if self.fusion == "dtop":
                predicted = fusion.logit_fusion(predicted, encoded.pruned)
            predicted = routing.raster_order(predicted)
        logits = predicted.x.reshape(x.shape[0], *self.grid, -1)
        return logits, {"normed": normed, "pre_logits": normed}
