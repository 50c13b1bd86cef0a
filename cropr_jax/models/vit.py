"""Vision Transformer with token reduction between its blocks.

Letters: b batch, p prefix tokens, m = h*w patch tokens, t tokens, d width, c classes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import linen as nn
from jaxtyping import Array, Float, Key

from cropr_jax import fusion, rng, routing
from cropr_jax.layers import (
    Attention,
    Dtype,
    LayerNorm,
    LayerScale,
    Mlp,
    drop_path,
    sincos_positions,
)
from cropr_jax.reducers import Context, Reducer
from cropr_jax.reducers.registry import REDUCERS
from cropr_jax.schedule import Schedule
from cropr_jax.tokens import Tokens, from_features

POOLS = ("cls", "mean_patches", "mean_all", "mean_size_weighted")
# Keys folded from an example's key: 0 for drop path, 1 + site for a reducer.
DROP_PATH_KEY = 0
FIRST_SITE_KEY = 1


@dataclasses.dataclass(frozen=True)
class ViTSpec:
    """Sizes of a variant (Dosovitskiy et al. 2021, Table 1; Touvron et al. 2021 for Ti and S)."""

    width: int
    depth: int
    heads: int
    patch: int


VARIANTS = {
    "ti": ViTSpec(192, 12, 3, 16),
    "s": ViTSpec(384, 12, 6, 16),
    "b": ViTSpec(768, 12, 12, 16),
    "l": ViTSpec(1024, 24, 16, 16),
    "h": ViTSpec(1280, 32, 16, 14),
}


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
      mlp_ratio: hidden width of the MLP over d.
      drop_path: rate of both residual branches.
      layer_scale: initial value of LayerScale, or None for a block without.
      needs: what the attention computes for the site (`cropr_jax.layers.NEEDS`).
      attention: 'auto', 'xla' or 'cudnn'.
      dtype: compute dtype.
    """

    heads: int
    mlp_ratio: float = 4.0
    drop_path: float = 0.0
    layer_scale: float | None = None
    needs: frozenset[str] = frozenset()
    prefix: int = 0
    attention: str = "auto"
    dtype: Dtype = jnp.float32

    def setup(self):
        self.norm1 = LayerNorm(dtype=self.dtype)
        self.attn = Attention(self.heads, self.needs, self.prefix, self.attention, dtype=self.dtype)
        self.norm2 = LayerNorm(dtype=self.dtype)
        if self.layer_scale is not None:
            self.layer_scale1 = LayerScale(self.layer_scale, self.dtype)
            self.layer_scale2 = LayerScale(self.layer_scale, self.dtype)

    def attend(
        self, tokens: Tokens, draw: Float[Array, "b"] | None
    ) -> tuple[Tokens, dict[str, jax.Array]]:
        """Attention branch. Returns tokens and what `needs` names."""
        branch, extras = self.attn(self.norm1(tokens.x))
        if self.layer_scale is not None:
            branch = self.layer_scale1(branch)
        return tokens.replace(x=tokens.x + drop_path(branch, self.drop_path, draw)), extras

    @nn.compact
    def feed_forward(self, tokens: Tokens, draw: Float[Array, "b"] | None) -> Tokens:
        """MLP branch."""
        hidden = int(self.mlp_ratio * tokens.x.shape[-1])
        branch = Mlp(hidden, dtype=self.dtype, name="mlp")(self.norm2(tokens.x))
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
    weights = weights[:, start:].astype(jnp.float32)
    total = jnp.einsum("btd,bt->bd", x[:, start:].astype(jnp.float32), weights)
    return (total / weights.sum(1, keepdims=True)).astype(x.dtype)


class ViT(nn.Module):
    """Vision Transformer for classification, with a reducer at each site of a schedule.

    Attributes:
      image_size: (height, width) in pixels, multiples of the patch.
      patch: (height, width) of a patch in pixels.
      width, depth, heads, mlp_ratio: d, L, attention heads, MLP hidden width over d.
      num_classes: c.
      prefix: p; the first prefix token is CLS.
      pool: see `pool`; 'cls' normalises before pooling (`norm`), the others after (`fc_norm`).
      layer_scale: initial value, None for no LayerScale.
      drop_path: rate of the last block of the linear rule; the first block has 0.
      drop_path_last_block: rate of the last block. The released code sets 0 whenever Cropr is on,
        so that fusion is never skipped; the unpruned model keeps `drop_path`.
      reduction: name in `cropr_jax.reducers.registry.REDUCERS`, or 'none'.
      reducer: further arguments of the reducer, as (name, value) pairs.
      schedule: sites and counts.
      fusion: 'llf' or 'none'.
      num_queries: n of every site.
      head_init_std: of the classification head; 0.02 as released, 2e-5 in MAE's fine-tuning.
      remat: recompute block activations in the backward pass.
      attention: 'auto', 'xla' or 'cudnn'.
      slim: inference form (`cropr_jax.models.slim`).
      dtype: compute dtype.
    """

    image_size: tuple[int, int]
    patch: tuple[int, int]
    width: int
    depth: int
    heads: int
    num_classes: int
    schedule: Schedule
    mlp_ratio: float = 4.0
    prefix: int = 1
    pool: str = "mean_all"
    layer_scale: float | None = None
    drop_path: float = 0.0
    drop_path_last_block: float = 0.0
    reduction: str = "none"
    reducer: tuple[tuple[str, Any], ...] = ()
    fusion: str = "none"
    num_queries: int = 1
    head_init_std: float = 0.02
    remat: bool = False
    attention: str = "auto"
    slim: bool = False
    dtype: Dtype = jnp.float32

    @property
    def grid(self) -> tuple[int, int]:
        """(h, w), the patch grid."""
        return self.image_size[0] // self.patch[0], self.image_size[1] // self.patch[1]

    @property
    def fused(self) -> bool:
        """Whether the last block sees all tokens."""
        return self.fusion == "llf" and bool(self.schedule.sites)

    @nn.nowrap
    def block_inputs(self) -> tuple[int, ...]:
        """Tokens that enter each block, the prefix counted."""
        height, width = self.grid
        return self.schedule.block_inputs(height * width, self.prefix, self.fused)

    @nn.nowrap
    def make_reducer(self, **kwargs: Any) -> Reducer:
        """The reducer of one site."""
        return REDUCERS[self.reduction](
            num_outputs=self.num_classes,
            num_queries=self.num_queries,
            slim=self.slim,
            dtype=self.dtype,
            **dict(self.reducer),
            **kwargs,
        )

    @nn.nowrap
    def reducer_losses(
        self, out: Mapping[str, Any], criterion: Callable[[jax.Array], jax.Array]
    ) -> dict[str, jax.Array]:
        """Losses of the sites by name, from what the model returned in training.

        Args:
          out: second output of the model.
          criterion: the task's loss as a function of auxiliary logits [b, n, c].
        """
        if self.reduction == "none":
            return {}
        return REDUCERS[self.reduction].losses(out["sites"], criterion)

    @nn.nowrap
    def drop_rates(self) -> tuple[float, ...]:
        """Drop path rate of each block."""
        linear = [self.drop_path * i / max(self.depth - 1, 1) for i in range(self.depth)]
        return (*linear[:-1], self.drop_path_last_block)

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "b height width 3"],
        *,
        train: bool = False,
        keys: Key[Array, "b"] | None = None,
    ) -> tuple[Float[Array, "b c"], Mapping[str, Any]]:
        """Classifies images.

        Args:
          images: normalised images of size `image_size`.
          train: run drop path and the training-only branches of the reducers.
          keys: one key per example (`rng.example_keys`); drop path and random reducers need them.

        Returns:
          Float32 logits, and a dict with `auxiliary` (logits [b, n, c] of each site, in training),
          `sites` (all outputs of each site), `kept` and `pruned` (raster indices of each site, in
          descending order of score), `pruned_after` (see `routing.pruned_after`), `features` (the
          tokens that leave each block), `embedded`, `pooled`. Under `jit` what is unused is free.

        Raises:
          ValueError: if the images have another size, or random numbers are needed without keys.
        """
        if images.shape[1:3] != self.image_size:
            raise ValueError(
                f"images are {images.shape[1]} x {images.shape[2]} but the model was built for "
                f"{self.image_size[0]} x {self.image_size[1]}"
            )
        pixels = rearrange(
            images,
            "b (h ph) (w pw) c -> b (h w) (ph pw c)",
            ph=self.patch[0],
            pw=self.patch[1],
        )
        tokens = self.embed(pixels)
        embedded = tokens.x
        draws = self.draw_drop_path(train, keys)

        removed_after = dict(self.schedule.sites)
        block_class = nn.remat(Block, methods=("attend", "feed_forward")) if self.remat else Block
        sites, kept, pruned, features = [], [], [], []
        for i, rate in enumerate(self.drop_rates()):
            if i == self.depth - 1 and self.fused:
                tokens = fusion.last_layer_fusion(tokens, pruned)
            removed = removed_after.get(i + 1)
            reducer = None if removed is None else self.make_reducer(name=f"reducer_{len(sites)}")
            block = block_class(
                self.heads,
                self.mlp_ratio,
                rate,
                self.layer_scale,
                reducer.needs if reducer else frozenset(),
                self.prefix,
                self.attention,
                self.dtype,
                name=f"block_{i}",
            )
            draw = (None, None) if draws is None else (draws[:, i, 0], draws[:, i, 1])

            tokens, extras = block.attend(tokens, draw[0])
            for hook in ("middle", "after"):
                if hook == "after":
                    tokens = block.feed_forward(tokens, draw[1])
                    features.append(tokens.x)
                if reducer and reducer.hook == hook:
                    context = self.context(len(sites), pixels, extras, reducer, keys)
                    tokens, gone, out = reducer(
                        tokens, context, keep=tokens.patches - removed, train=train
                    )
                    sites.append(out)
                    kept.append(tokens.index)
                    if gone is not None:
                        pruned.append(gone)

        logits, pooled = self.classify(tokens)
        out = {
            "auxiliary": tuple(site["auxiliary"] for site in sites if "auxiliary" in site),
            "sites": tuple(sites),
            "kept": tuple(kept),
            "pruned": tuple(gone.index for gone in pruned),
            "features": tuple(features),
            "embedded": embedded,
            "pooled": pooled,
        }
        if len(pruned) == len(sites):
            survivors = kept[-1] if kept else tokens.index
            out["pruned_after"] = routing.pruned_after(
                survivors, out["pruned"], self.schedule.blocks, self.grid
            )
        return logits, out

    def embed(self, pixels: Float[Array, "b m f"]) -> Tokens:
        """Patch and position embedding, prefix tokens in front."""
        x = PatchEmbed(self.width, self.patch, self.dtype, name="patch_embed")(pixels)
        if self.prefix:
            cls = self.param("cls", nn.initializers.normal(1e-6), (1, self.prefix, self.width))
            cls = jnp.broadcast_to(cls.astype(self.dtype), (x.shape[0], self.prefix, self.width))
            x = jnp.concatenate([cls, x], axis=1)
        position = self.param("pos_embed", self.position_init)
        return from_features(x + position.astype(self.dtype), self.grid, self.prefix)

    @nn.nowrap
    def position_init(self, key: jax.Array) -> Float[Array, "1 t d"]:
        """MAE's table: sines and cosines for the patches, zeros for the prefix."""
        del key
        table = sincos_positions(self.grid, self.width)
        return jnp.pad(table, ((self.prefix, 0), (0, 0)))[None]

    def draw_drop_path(
        self, train: bool, keys: Key[Array, "b"] | None
    ) -> Float[Array, "b depth 2"] | None:
        """Uniform numbers for both branches of every block, or None when nothing is dropped."""
        if not train or not any(self.drop_rates()):
            return None
        if keys is None:
            raise ValueError("drop path draws at random: call the model with keys=...")
        return rng.uniform(rng.fold(keys, DROP_PATH_KEY), (self.depth, 2))

    def context(
        self,
        site: int,
        pixels: Float[Array, "b m f"],
        extras: Mapping[str, jax.Array],
        reducer: Reducer,
        keys: Key[Array, "b"] | None,
    ) -> Context:
        """What the reducer of a site may read."""
        return Context(
            keys=None if keys is None else rng.fold(keys, FIRST_SITE_KEY + site),
            pixels=pixels if "pixels" in reducer.needs else None,
            **extras,
        )

    def classify(self, tokens: Tokens) -> tuple[Float[Array, "b c"], Float[Array, "b d"]]:
        """Logits and the pooled features before the last norm (after it with pool='cls')."""
        if self.pool == "cls":
            tokens = tokens.replace(x=LayerNorm(dtype=self.dtype, name="norm")(tokens.x))
            pooled = features = pool(tokens, self.pool)
        else:
            pooled = pool(tokens, self.pool)
            features = LayerNorm(dtype=self.dtype, name="fc_norm")(pooled)
        head = nn.Dense(
            self.num_classes,
            dtype=self.dtype,
            kernel_init=nn.initializers.normal(self.head_init_std),
            name="head",
        )
        return head(features).astype(jnp.float32), pooled
