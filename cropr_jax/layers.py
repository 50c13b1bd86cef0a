"""Layers of a pre-norm Vision Transformer block: attention, rotary positions, MLPs, norms.

Parameters are float32. `dtype` is the compute dtype; layer-norm statistics, softmax and whatever a
reducer asks of the attention are computed in float32.

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

# What a reducer may ask of a block's attention, or of the image (`pixels`).
NEEDS = frozenset({"cls_row", "col_mean", "col_mean_all", "k_mean", "v_norm", "pixels"})
# Query rows in one chunk of `col_mean`: the b x h x t x t matrix never exists as a whole.
COL_MEAN_CHUNK = 64
# Channels that `fold_bias` adds: cuDNN takes head widths in steps of 8.
BIAS_CHANNELS = 8


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


def choose_attention(requested: str, *, backend: str, dtype: Dtype, head_width: int) -> str:
    """'xla' for `attend`, or 'cudnn' for `jax.nn.dot_product_attention`'s fused kernel.

    'auto' takes cuDNN's fused attention where it applies: on CUDA, in half precision, with heads of
    at most 128 channels in steps of 8. Otherwise XLA's.

    Raises:
      ValueError: on an unknown name, or if cuDNN is requested where it does not run.
    """
    if requested not in ("auto", "xla", "cudnn"):
        raise ValueError(f"attention: found {requested!r}, expected 'auto', 'xla' or 'cudnn'")
    half = dtype in (jnp.bfloat16, jnp.float16)
    able = backend in ("gpu", "cuda") and half and head_width % 8 == 0 and head_width <= 128
    if requested == "cudnn" and not able:
        raise ValueError(
            f"attention='cudnn' needs a CUDA device, half precision and a head width divisible by "
            f"8 up to 128; found {backend}, {jnp.dtype(dtype).name}, {head_width}. Use 'auto'."
        )
    return "cudnn" if requested != "xla" and able else "xla"


def attend(
    query: Float[Array, "b t h k"],
    key: Float[Array, "b s h k"],
    value: Float[Array, "b s h k"],
    bias: Float[Array, "b 1 1 s"] | None,
) -> Float[Array, "b t h k"]:
    """Softmax attention in plain XLA: logits and softmax in float32, heads first.

    Heads are moved in front once; XLA's CPU backend would else transpose inside every product.
    """
    query, key, value = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
    query = query * query.shape[-1] ** -0.5
    logits = jnp.einsum("bhtk,bhsk->bhts", query, key, preferred_element_type=jnp.float32)
    if bias is not None:
        logits += bias.astype(jnp.float32)
    weights = nn.softmax(logits, axis=-1).astype(value.dtype)
    return jnp.einsum("bhts,bhsk->bhtk", weights, value).transpose(0, 2, 1, 3)


def attend_masked(
    query: Float[Array, "b t h k"],
    key: Float[Array, "b t h k"],
    value: Float[Array, "b t h k"],
    policy: Float[Array, "b t"],
) -> Float[Array, "b t h k"]:
    """Softmax attention in which a token of policy 0 is seen by itself alone.

    The exponentials are multiplied by the policy, 1 on the diagonal, so that the policy gets a
    gradient where it is 0. For tokens of policy 1 the result is that without the others, up to 1e-6
    (a constant of the released code, which keeps the sum from 0).

    Source: Rao et al. 2021, Eq. 11; raoyongming/DynamicViT: models/dyvit.py.
    """
    count, small = policy.shape[1], 1e-6
    logits = jnp.einsum("bthk,bshk->bhts", query, key, preferred_element_type=jnp.float32)
    logits *= query.shape[-1] ** -0.5
    logits -= lax.stop_gradient(logits.max(-1, keepdims=True))
    seen = jnp.where(jnp.eye(count, dtype=bool), 1.0, policy[:, None, None])
    weights = jnp.exp(logits) * seen
    weights = (weights + small / count) / (weights.sum(-1, keepdims=True) + small)
    return jnp.einsum("bhts,bshk->bthk", weights.astype(value.dtype), value)


def fold_bias(
    query: Float[Array, "b t h k"],
    key: Float[Array, "b s h k"],
    value: Float[Array, "b s h k"],
    key_bias: Float[Array, "b s"],
) -> tuple[Float[Array, "b t h c"], Float[Array, "b s h c"], Float[Array, "b s h c"]]:
    """A bias on keys as further channels, for kernels without one: c = k + 8, the scale that of k.

    cuDNN's kernel takes a bias for every pair of tokens only, and in training none for an odd
    number of them. In half precision the bias is the sum of two channels, its value and what
    rounding left of it.
    """
    bias = lax.stop_gradient(key_bias) * query.shape[-1] ** 0.5
    high = bias.astype(key.dtype)
    low = (bias - high.astype(jnp.float32)).astype(key.dtype)
    extra = jnp.stack([high, low], axis=-1)[:, :, None]
    extra = jnp.broadcast_to(extra, (*key.shape[:3], 2))

    def widen(x: jax.Array, *parts: jax.Array) -> jax.Array:
        x = jnp.concatenate([x, *parts], axis=-1)
        return jnp.pad(x, [(0, 0)] * 3 + [(0, value.shape[-1] + BIAS_CHANNELS - x.shape[-1])])

    ones = jnp.ones((*query.shape[:3], 2), query.dtype)
    return widen(query, ones), widen(key, extra), widen(value)


def cls_row(
    query: Float[Array, "b t h k"],
    key: Float[Array, "b t h k"],
    key_bias: Float[Array, "b t"] | None = None,
) -> Float[Array, "b h t"]:
    """Softmax attention of the first token, recomputed so that attention itself stays fused."""
    scale = query.shape[-1] ** -0.5
    logits = jnp.einsum("bhk,bthk->bht", query[:, 0], key, preferred_element_type=jnp.float32)
    logits *= scale
    if key_bias is not None:
        logits += key_bias[:, None]
    return nn.softmax(logits, axis=-1)


def col_mean(
    query: Float[Array, "b t h k"],
    key: Float[Array, "b t h k"],
    skip: int,
    key_bias: Float[Array, "b t"] | None = None,
) -> Float[Array, "b t"]:
    """Mean attention that every token receives, over heads and the queries after the first `skip`.

    Query rows are taken in chunks, so memory stays linear in t.
    """
    scale = query.shape[-1] ** -0.5
    rows = query.shape[1] - skip
    total = jnp.zeros(key.shape[:2], jnp.float32)
    for start in range(skip, query.shape[1], COL_MEAN_CHUNK):
        chunk = query[:, start : start + COL_MEAN_CHUNK]
        logits = jnp.einsum("bshk,bthk->bhst", chunk, key, preferred_element_type=jnp.float32)
        logits *= scale
        if key_bias is not None:
            logits += key_bias[:, None, None]
        total += nn.softmax(logits, axis=-1).sum((1, 2))
    return total / (rows * query.shape[2])


class Attention(nn.Module):
    """Multi-head self-attention with biases on q, v and, unless told otherwise, k.

    Attributes:
      heads: number of heads.
      use_key_bias: false for EVA-02. Without rotation the softmax cancels a bias on k, with it not.
      needs: what to compute beside the output, names of `NEEDS`.
      prefix: number of prefix tokens; they do not vote in `col_mean`, but in `col_mean_all`.
      implementation: 'auto', 'xla' or 'cudnn'.
      dtype: compute dtype.
    """

    heads: int
    use_key_bias: bool = True
    needs: frozenset[str] = frozenset()
    prefix: int = 0
    implementation: str = "auto"
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b t d"],
        key_bias: Float[Array, "b t"] | None = None,
        angles: Float[Array, "b t a"] | None = None,
        policy: Float[Array, "b t"] | None = None,
    ) -> tuple[Float[Array, "b t d"], dict[str, jax.Array]]:
        """Returns the attention output and what `needs` names.

        Args:
          x: normalised tokens.
          key_bias: float32, added to the logits of each key, over all heads and queries.
          angles: by which queries and keys are turned (`rope_angles`), 0 for prefix tokens.
          policy: see `attend_masked`, which then computes the output, without `key_bias`.
        """
        width = x.shape[-1]
        if width % self.heads:
            raise ValueError(f"width {width} is not divisible by {self.heads} heads")
        head_width = width // self.heads

        project = functools.partial(
            nn.DenseGeneral, (self.heads, head_width), dtype=self.dtype, kernel_init=xavier_init
        )
        query = project(name="query")(x)
        key = project(name="key", use_bias=self.use_key_bias)(x)
        value = project(name="value")(x)
        extras = {}
        if "k_mean" in self.needs:  # before the rotation: what a token holds, not where it stands
            extras["k_mean"] = lax.stop_gradient(key.astype(jnp.float32).mean(2))
        if "v_norm" in self.needs:
            values = lax.stop_gradient(value).astype(jnp.float32)
            extras["v_norm"] = jnp.linalg.norm(values, axis=-1).transpose(0, 2, 1)
        if angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        implementation = choose_attention(
            self.implementation,
            backend=jax.default_backend(),
            dtype=query.dtype,
            head_width=head_width + (0 if key_bias is None else BIAS_CHANNELS),
        )
        if policy is not None:
            mixed = attend_masked(query, key, value, policy)
        elif implementation == "cudnn":
            folded = query, key, value
            if key_bias is not None:
                folded = fold_bias(query, key, value, key_bias)
            mixed = jax.nn.dot_product_attention(
                *folded, scale=head_width**-0.5, implementation="cudnn"
            )[..., :head_width]
        else:
            bias = None if key_bias is None else key_bias[:, None, None, :]
            mixed = attend(query, key, value, bias)
        out = nn.DenseGeneral(
            width, axis=(-2, -1), dtype=self.dtype, kernel_init=xavier_init, name="out"
        )(mixed)

        if "cls_row" in self.needs:
            extras["cls_row"] = cls_row(query, key, key_bias)
        if "col_mean" in self.needs:
            extras["col_mean"] = col_mean(query, key, self.prefix, key_bias)
        if "col_mean_all" in self.needs:
            extras["col_mean_all"] = col_mean(query, key, 0, key_bias)
        return out, extras


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
