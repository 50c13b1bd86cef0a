"""SiT's token slimming: an MLP says how much of each patch goes into each output.

Letters: b batch, m patch tokens, k outputs, g patches of the image, d width.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from cropr_jax.core.layers import Dtype, LayerNorm, Mlp, gelu, normal_init
from cropr_jax.core.reducer import Prediction, SiteSizes
from cropr_jax.reducers.distillation import divergence, squared_error
from cropr_jax.reducers.soft import SoftReducer
from cropr_jax.tokens import Tokens


class Reverse(nn.Module):
    """Guesses the tokens of all places from the few that are left, for one block.

    An MLP along the tokens, k -> 4 g -> g, then one along the channels with a residual.
    Sense-X/SiT: models/lvvit.py, with its layer-norm epsilon of 1e-5.
    """

    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b k d"], patches: int) -> Float[Array, "b g d"]:
        def dense(x: jax.Array, features: int, name: str) -> jax.Array:
            return nn.Dense(features, dtype=self.dtype, kernel_init=normal_init, name=name)(x)

        channels = LayerNorm(epsilon=1e-5, dtype=self.dtype, name="norm1")(x).swapaxes(1, 2)
        x = dense(gelu(dense(channels, 4 * patches, "fc1")), patches, "fc2").swapaxes(1, 2)
        normed = LayerNorm(epsilon=1e-5, dtype=self.dtype, name="norm2")(x)
        mlp = Mlp(4 * x.shape[-1], kernel_init=normal_init, dtype=self.dtype, name="mlp")
        return x + mlp(normed)


class Reverses(nn.Module):
    """A `Reverse` for each block that asks for one."""

    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b k d"], patches: int, block: int) -> Float[Array, "b g d"]:
        return Reverse(self.dtype, name=f"block_{block}")(x, patches)


class SiT(SoftReducer):
    """Softmax over the patch tokens of a two-layer MLP of each token, one logit for each output.

    Zong et al., "Self-slimmed Vision Transformer", ECCV 2022; Sense-X/SiT: models/lvvit.py,
    losses.py. By default the token slimming module alone, as JoakimHaurum/TokenReduction:
    models/sit.py has it. The paper divides the logits by a temperature; both codes multiply by a
    learned scale, its inverse, as here.

    Attributes:
      distill: learn from a teacher too, as the paper does: its logits, and the tokens after each of
        its blocks (feature recalibration distillation). From the first site on, the student's come
        from reverse modules, which only training has. Without a second, convolutional teacher.
      token_weight, logit_weight: of the two losses.
    """

    distill: bool = False
    token_weight: float = 2.0
    logit_weight: float = 2.0

    count_axes: ClassVar[Mapping[str, int]] = {"fc2/kernel": 1, "fc2/bias": 0}

    @property
    def needs_teacher(self) -> bool:
        return self.distill

    @property
    def describe_losses(self) -> str:
        if not self.distill:
            return ""
        return f"{self.logit_weight:g} x KL of logits, {self.token_weight:g} x mse of all tokens"

    def setup(self):
        if self.distill:
            self.reverse = Reverses(self.dtype)

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

    def recover(self, tokens: Tokens, block: int) -> Float[Array, "b g d"] | None:
        if not self.distill:
            return None
        height, width = tokens.grid
        return self.reverse(tokens.x[:, tokens.prefix :], height * width, block)

    def distillation(self, student: Prediction, teacher: Prediction) -> dict[str, jax.Array]:
        """KL of the logits, and the error of the patch tokens after each block, its mean over all.

        Before the first site the tokens are compared as they are.
        """
        (logits, out), (taught, whole) = student, teacher
        recovered = out["recovered"]
        before = len(whole["features"]) - len(recovered)
        ours = (*out["features"][:before], *recovered)
        patches = recovered[-1].shape[1]
        errors = [
            squared_error(one[:, -patches:], other[:, -patches:]).mean()
            for one, other in zip(ours, whole["features"], strict=True)
        ]
        return {
            "distill_logits": self.logit_weight * divergence(logits, taught).mean(),
            "distill_tokens": self.token_weight * jnp.stack(errors).mean(),
        }

    @classmethod
    def slim_params(cls, params: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in params.items() if name != "reverse"}
