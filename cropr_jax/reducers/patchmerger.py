"""PatchMerger: learned queries attend to all patches and replace them."""

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from cropr_jax.core.layers import LayerNorm
from cropr_jax.reducers.soft import SoftReducer

SCALES = ("none", "width")


class PatchMerger(SoftReducer):
    """Y = softmax(Q X^T) X over the normalised patch tokens X, softmax over the tokens.

    Renggli et al., "Learning to Merge Tokens in Vision Transformers", 2022. Normalising first, with
    epsilon 1e-5, is what JoakimHaurum/TokenReduction: models/patchmerger.py and
    lucidrains/vit-pytorch: vit_with_patch_merger.py do; the paper's formula does not show it.

    Attributes:
      scale: of the logits. 'none' is the formula (and TokenReduction): at width 1,024 the initial
        weights are then almost one-hot and hardly learn. 'width' divides by the root of the width
        (vit-pytorch).
      init_std: of the queries.
    """

    scale: str = "none"
    init_std: float = 1.0

    count_axes: ClassVar[Mapping[str, int]] = {"queries": 0}

    @property
    def needs(self) -> frozenset[str]:
        if self.scale not in SCALES:
            raise ValueError(f"patchmerger scale: found {self.scale!r}, expected one of {SCALES}")
        return frozenset()

    @nn.compact
    def mix(
        self, x: Float[Array, "b m d"], keep: int
    ) -> tuple[Float[Array, "b k m"], Float[Array, "b m d"]]:
        width = x.shape[-1]
        x = LayerNorm(epsilon=1e-5, dtype=self.dtype, name="norm")(x)
        queries = self.param("queries", nn.initializers.normal(self.init_std), (keep, width))
        logits = jnp.einsum("kd,bmd->bkm", queries, x.astype(jnp.float32))
        if self.scale == "width":
            logits *= width**-0.5
        return nn.softmax(logits, axis=-1), x
