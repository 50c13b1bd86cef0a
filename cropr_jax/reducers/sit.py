"""SiT's token slimming: an MLP says how much of each patch goes into each output."""

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from cropr_jax.layers import LayerNorm, gelu, normal_init
from cropr_jax.reducers.base import SiteSizes
from cropr_jax.reducers.soft import SoftReducer


class SiT(SoftReducer):
    """Softmax over the patch tokens of a two-layer MLP of each token, one logit for each output.

    The token slimming module of Zong et al., "Self-slimmed Vision Transformer", ECCV 2022
    (Sense-X/SiT: models/lvvit.py), without the reverse modules and the distillation of its
    training, as JoakimHaurum/TokenReduction: models/sit.py has it. The paper divides the logits by
    a temperature; both codes multiply by a learned scale, its inverse, as here.
    """

    count_axes: ClassVar[Mapping[str, int]] = {"fc2/kernel": 1, "fc2/bias": 0}

    def logit_macs(self, sizes: SiteSizes) -> int:
        """Those of its MLP."""
        hidden = sizes.width // 2
        return sizes.width * hidden + hidden * sizes.keep

    @nn.compact
    def mix(
        self, x: Float[Array, "b m d"], keep: int
    ) -> tuple[Float[Array, "b k m"], Float[Array, "b m d"]]:
        hidden = LayerNorm(epsilon=1e-5, dtype=self.dtype, name="norm")(x)
        hidden = nn.Dense(x.shape[-1] // 2, dtype=self.dtype, kernel_init=normal_init, name="fc1")(
            hidden
        )
        # In float32 from here on, whatever the compute dtype: these are logits.
        logits = nn.Dense(keep, kernel_init=normal_init, name="fc2")(
            gelu(hidden).astype(jnp.float32)
        )
        scale = self.param("scale", nn.initializers.ones, ())
        return nn.softmax(logits * scale, axis=1).swapaxes(1, 2), x
