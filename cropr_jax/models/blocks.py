"""Parts of the backbone: patch embedding, transformer block, pooling.

Letters: b batch, p prefix tokens, m patch tokens, t = p + m, f values of a patch, d width.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from cropr_jax.core.attention import Attention
from cropr_jax.core.layers import Dtype, LayerNorm, LayerScale, Mlp, SwiGlu, drop_path, rope_angles
from cropr_jax.tokens import Tokens

POOLS = ("cls", "mean_patches", "mean_all", "mean_size_weighted")
MLPS = ("gelu", "swiglu", "swiglu_norm")


class PatchEmbed(nn.Module):
    """Linear map of flattened patches: a convolution whose stride is its kernel size."""

    width: int
    patch: tuple[int, int]
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, pixels: Float[Array, "b m f"]) -> Float[Array, "b m d"]:
        channels = pixels.shape[-1] // (self.patch[0] * self.patch[1])
        shape = (*self.patch, channels, self.width)
        # PyTorch's default for convolutions, as timm leaves it: uniform of variance 1 / (3 fan-in).
        init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        kernel = self.param("kernel", init, shape).reshape(-1, self.width)
        bias = self.param("bias", nn.initializers.zeros, (self.width,))
        return pixels.astype(self.dtype) @ kernel.astype(self.dtype) + bias.astype(self.dtype)


class Block(nn.Module):
    """Pre-norm transformer block in two halves, so that a site can act between them.

    Attributes:
      heads: attention heads.
      hidden: hidden width of the MLP.
      mlp: 'gelu' (ViT), 'swiglu' (EVA-02 Ti, S) or 'swiglu_norm' (EVA-02 B, L).
      use_key_bias: whether keys have a bias.
      rope_reference: (h, w) of the grid that rotary embeddings refer to, None for none of them.
      drop_path: rate of both residual branches.
      layer_scale: initial value of LayerScale, or None for a block without.
      needs: what the attention computes for the site (`cropr_jax.core.attention.NEEDS`).
      prefix: number of prefix tokens.
      attention: 'auto', 'xla' or 'cudnn'.
      dtype: compute dtype.
    """

    heads: int
    hidden: int
    mlp: str = "gelu"
    use_key_bias: bool = True
    rope_reference: tuple[int, int] | None = None
    drop_path: float | int = 0.0
    layer_scale: float | int | None = None
    needs: frozenset[str] = frozenset()
    prefix: int = 0
    attention: str = "auto"
    dtype: Dtype = jnp.float32

    def setup(self):
        self.norm1 = LayerNorm(dtype=self.dtype)
        self.attn = Attention(
            self.heads, self.use_key_bias, self.needs, self.prefix, self.attention, self.dtype
        )
        self.norm2 = LayerNorm(dtype=self.dtype)
        self.norm_source = LayerNorm(dtype=self.dtype)
        if self.layer_scale is not None:
            self.layer_scale1 = LayerScale(self.layer_scale, self.dtype)
            self.layer_scale2 = LayerScale(self.layer_scale, self.dtype)

    def attend(
        self, tokens: Tokens, draw: Float[Array, "b"] | None, source: Tokens | None = None
    ) -> tuple[Tokens, dict[str, jax.Array]]:
        """Attention branch. Returns tokens and what `needs` names.

        Args:
          tokens: the queries.
          draw: for drop path.
          source: what keys and values of cross-attention are taken from, under a norm of its own;
            by default `tokens`.
        """
        x, angles = self.norm1(tokens.x), self.angles(tokens)
        if source is None:
            branch, extras = self.attn(x, tokens.key_bias(), angles, tokens.policy)
        else:
            branch, extras = self.attn(
                x,
                source.key_bias(),
                angles,
                source=self.norm_source(source.x),
                source_angles=self.angles(source),
            )
        if self.layer_scale is not None:
            branch = self.layer_scale1(branch)
        return tokens.replace(x=tokens.x + drop_path(branch, self.drop_path, draw)), extras

    @nn.nowrap
    def angles(self, tokens: Tokens) -> Float[Array, "b t a"] | None:
        """Rotation of every token by the place it came from, wherever it stands in the sequence."""
        if self.rope_reference is None:
            return None
        head_width = tokens.x.shape[-1] // self.heads
        angles = rope_angles(tokens.coordinates(), tokens.grid, self.rope_reference, head_width)
        return jnp.pad(angles, ((0, 0), (tokens.prefix, 0), (0, 0)))

    @nn.compact
    def feed_forward(self, tokens: Tokens, draw: Float[Array, "b"] | None) -> Tokens:
        """MLP branch."""
        if self.mlp == "gelu":
            mlp = Mlp(self.hidden, dtype=self.dtype, name="mlp")
        else:
            mlp = SwiGlu(self.hidden, self.mlp == "swiglu_norm", self.dtype, name="mlp")
        branch = mlp(self.norm2(tokens.x))
        if self.layer_scale is not None:
            branch = self.layer_scale2(branch)
        return tokens.replace(x=tokens.x + drop_path(branch, self.drop_path, draw))


def pool(tokens: Tokens, name: str) -> Float[Array, "b d"]:
    """One vector per image.

    Args:
      tokens: output of the last block.
      name: 'cls' takes the first token; 'mean_patches' averages the patch tokens (MAE, timm);
        'mean_all' averages all tokens with CLS (benbergner/cropr); 'mean_size_weighted' averages
        the patches that the tokens stand for (ToMe).

    Raises:
      ValueError: on an unknown name, or 'cls' without prefix tokens.
    """
    if name not in POOLS:
        raise ValueError(f"pool: found {name!r}, expected one of {POOLS}")
    x, prefix = tokens.x, tokens.prefix
    if name == "cls":
        if not prefix:
            raise ValueError("pool='cls' needs prefix >= 1; use 'mean_patches'")
        return x[:, 0]
    start = 0 if name == "mean_all" else prefix
    weights = jnp.ones(x.shape[:2], jnp.float32) if tokens.valid is None else tokens.valid
    if name == "mean_size_weighted" and tokens.size is not None:
        weights = weights * tokens.size
    if tokens.policy is not None:
        weights = weights * tokens.policy
    weights = weights[:, start:].astype(jnp.float32)
    total = jnp.einsum("btd,bt->bd", x[:, start:].astype(jnp.float32), weights)
    # A policy may have dropped every patch.
    return (total / jnp.maximum(weights.sum(1, keepdims=True), 1e-6)).astype(x.dtype)
