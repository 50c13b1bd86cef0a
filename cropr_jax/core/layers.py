"""Layers of a pre-norm Vision Transformer block beside its attention: positions, MLPs, norms.

Parameters are float32. `dtype` is the compute dtype; layer-norm statistics are computed in float32.

Letters: b batch, t tokens, m patch tokens, d width, h heads, k head width, a = k / 2 angles.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Float

Dtype = Any  # whatever `jnp.dtype` accepts

# Two-pass variance: the residual streams of pretrained ViTs hold very large channels.
LayerNorm = functools.partial(nn.LayerNorm, epsilon=1e-6, use_fast_variance=False)
# Of what the released code adds to a pretrained backbone: auxiliary branches and heads.
normal_init = nn.initializers.normal(0.02)
# Of the backbone itself, as in MAE and big_vision: a width of 64 would starve with a std of 0.02.
xavier_init = nn.initializers.xavier_uniform()


def gelu(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Exact GELU by erf, as PyTorch computes it; JAX's own takes erfc, which is slower on CPU."""
    return 0.5 * x * (1 + lax.erf(x * 2**-0.5))


def sincos_positions(
    grid: tuple[int, int], width: int, temperature: float = 10_000.0
) -> Float[Array, "m d"]:
    """Fixed 2-D sine-cosine table of a grid in raster order, column first (facebookresearch/mae).

    A fresh position embedding starts there: from tiny random values it takes a small model many
    epochs to tell places apart.

    Raises:
      ValueError: if the width is no multiple of 4.
    """
    if width % 4:
        raise ValueError(f"sine-cosine positions need a width divisible by 4, found {width}")
    omega = temperature ** (-jnp.arange(width // 4) / (width // 4))
    row, column = jnp.meshgrid(*(jnp.arange(side) for side in grid), indexing="ij")
    angles = [place.reshape(-1, 1) * omega for place in (column, row)]
    return jnp.concatenate([f(angle) for angle in angles for f in (jnp.sin, jnp.cos)], axis=1)


def rope_angles(
    coordinates: Float[Array, "b m 2"],
    grid: tuple[int, int],
    reference: tuple[int, int],
    head_width: int,
) -> Float[Array, "b m a"]:
    """Angle by which rotary embeddings turn each pair of channels of a token, in radians.

    The first half of the pairs turns with the row, the second with the column, at frequencies
    10000^(-4 j / k). A grid of another size than the one trained on is squeezed or stretched into
    the range of that one.

    Args:
      coordinates: row and column of each token in its full grid.
      grid: (h, w), of all patches of the image whatever is left of them.
      reference: (h, w) of the grid that the frequencies were trained on.
      head_width: k, a multiple of 4.

    Source: baaivision/EVA: EVA-02/asuka/rope.py; timm `layers/pos_embed_sincos.py`.
    """
    count = head_width // 4
    frequencies = 10_000.0 ** (-jnp.arange(count, dtype=jnp.float32) / count)
    scaled = coordinates / jnp.array(grid, jnp.float32) * jnp.array(reference, jnp.float32)
    return (scaled[..., None] * frequencies).reshape(*coordinates.shape[:2], -1)


def rotate(x: Float[Array, "b t h k"], angles: Float[Array, "b t k//2"]) -> Float[Array, "b t h k"]:
    """Turns neighbouring channels (2 j, 2 j + 1) by the j-th angle of each token, in float32.

    Differs from most language models, which pair channel j with channel j + k/2.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    sin, cos = jnp.sin(angles)[:, :, None], jnp.cos(angles)[:, :, None]
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def upsample(x: Float[Array, "b h w c"], size: tuple[int, int]) -> Float[Array, "b height width c"]:
    """Bilinear resize to a larger (height, width): pixel centres at half, clamped at the edges.

    That of PyTorch's `interpolate` with `align_corners=False`.
    """
    shape = (x.shape[0], *size, x.shape[-1])
    return jax.image.resize(x, shape, "bilinear", antialias=False)


def drop_path(
    x: Float[Array, "b t d"], rate: float, draw: Float[Array, "b"] | None
) -> Float[Array, "b t d"]:
    """Zeroes a residual branch for a share `rate` of the examples, scales up the others.

    Stochastic depth (Huang et al. 2016) with one draw per example; `draw` is uniform in [0, 1),
    None outside training.
    """
    if draw is None or rate == 0:
        return x
    keep = 1 - rate
    return jnp.where((draw < keep)[:, None, None], x / keep, 0).astype(x.dtype)


class Mlp(nn.Module):
    """Linear, activation, linear.

    Attributes:
      hidden: hidden width.
      activation: exact (erf) GELU unless given.
      kernel_init: of both kernels.
      dtype: compute dtype.
    """

    hidden: int
    activation: Callable[[jax.Array], jax.Array] = gelu
    kernel_init: Callable[..., jax.Array] = xavier_init
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        dense = functools.partial(nn.Dense, dtype=self.dtype, kernel_init=self.kernel_init)
        hidden = self.activation(dense(self.hidden, name="fc1")(x))
        return dense(x.shape[-1], name="fc2")(hidden)


class SwiGlu(nn.Module):
    """Gated MLP of EVA-02: SiLU(gate) * up, a norm of the product where there is one, down.

    Attributes:
      hidden: hidden width, of gate and up each.
      norm: normalise the hidden features (sub-LN).
      dtype: compute dtype.
    """

    hidden: int
    norm: bool = False
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        dense = functools.partial(nn.Dense, dtype=self.dtype, kernel_init=xavier_init)
        hidden = nn.silu(dense(self.hidden, name="gate")(x)) * dense(self.hidden, name="up")(x)
        if self.norm:
            hidden = LayerNorm(dtype=self.dtype, name="norm")(hidden)
        return dense(x.shape[-1], name="down")(hidden)


class LayerScale(nn.Module):
    """Learned scale of each channel of a residual branch (CaiT, DINOv2)."""

    initial: float
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        gamma = self.param("gamma", nn.initializers.constant(self.initial), (x.shape[-1],))
        return x * gamma.astype(self.dtype)
