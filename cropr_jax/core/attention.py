"""Self-attention of a Vision Transformer block, and what reducers ask of it.

Parameters are float32. `dtype` is the compute dtype; softmax and whatever a reducer asks for are
computed in float32.

Letters: b batch, t and s tokens, d width, h heads, k head width, a = k / 2 angles.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Float

from cropr_jax.core.layers import Dtype, rotate, xavier_init

# What a reducer may ask of a block's attention, or of the image (`pixels`).
NEEDS = frozenset({"cls_row", "col_mean", "col_mean_all", "k_mean", "v_norm", "pixels"})
# Query rows in one chunk of `col_mean`: the b x h x t x t matrix never exists as a whole.
COL_MEAN_CHUNK = 64
# Channels that `fold_bias` adds: cuDNN takes head widths in steps of 8.
BIAS_CHANNELS = 8


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
    """Multi-head attention with biases on q, v and, unless told otherwise, k.

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
        key_bias: Float[Array, "b s"] | None = None,
        angles: Float[Array, "b t a"] | None = None,
        policy: Float[Array, "b t"] | None = None,
        source: Float[Array, "b s d"] | None = None,
        source_angles: Float[Array, "b s a"] | None = None,
    ) -> tuple[Float[Array, "b t d"], dict[str, jax.Array]]:
        """Returns the attention output and what `needs` names.

        Args:
          x: normalised tokens.
          key_bias: float32, added to the logits of each key, over all heads and queries.
          angles: by which queries and keys are turned (`rope_angles`), 0 for prefix tokens.
          policy: see `attend_masked`, which then computes the output, without `key_bias`.
          source: normalised tokens that keys and values are taken from, for cross-attention; by
            default those of `x`.
          source_angles: of these.
        """
        if source is None:
            source, source_angles = x, angles
        width = x.shape[-1]
        if width % self.heads:
            raise ValueError(f"width {width} is not divisible by {self.heads} heads")
        head_width = width // self.heads

        project = functools.partial(
            nn.DenseGeneral, (self.heads, head_width), dtype=self.dtype, kernel_init=xavier_init
        )
        query = project(name="query")(x)
        key = project(name="key", use_bias=self.use_key_bias)(source)
        value = project(name="value")(source)
        extras = {}
        if "k_mean" in self.needs:  # before the rotation: what a token holds, not where it stands
            extras["k_mean"] = lax.stop_gradient(key.astype(jnp.float32).mean(2))
        if "v_norm" in self.needs:
            values = lax.stop_gradient(value).astype(jnp.float32)
            extras["v_norm"] = jnp.linalg.norm(values, axis=-1).transpose(0, 2, 1)
        if angles is not None and source_angles is not None:
            query, key = rotate(query, angles), rotate(key, source_angles)
        if policy is not None:
            mixed = attend_masked(query, key, value, policy)
        else:
            mixed = self.mix(query, key, value, key_bias)
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

    @nn.nowrap
    def mix(
        self,
        query: Float[Array, "b t h k"],
        key: Float[Array, "b s h k"],
        value: Float[Array, "b s h k"],
        key_bias: Float[Array, "b s"] | None,
    ) -> Float[Array, "b t h k"]:
        """Values mixed by the implementation that suits the device."""
        head_width = query.shape[-1]
        implementation = choose_attention(
            self.implementation,
            backend=jax.default_backend(),
            dtype=query.dtype,
            head_width=head_width + (0 if key_bias is None else BIAS_CHANNELS),
        )
        if implementation != "cudnn":
            bias = None if key_bias is None else key_bias[:, None, None, :]
            return attend(query, key, value, bias)
        folded = query, key, value
        if key_bias is not None:
            folded = fold_bias(query, key, value, key_bias)
        mixed = jax.nn.dot_product_attention(
            *folded, scale=head_width**-0.5, implementation="cudnn"
        )
        return mixed[..., :head_width]
