"""Vision Transformer with token reduction between its blocks.

Letters: b batch, p prefix tokens, m = h*w patch tokens, t tokens, d width, c classes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import linen as nn
from jaxtyping import Array, Float, Key

from cropr_jax import fusion, rng, routing
from cropr_jax.layers import Dtype, LayerNorm, sincos_positions
from cropr_jax.models.blocks import Block, PatchEmbed, pool
from cropr_jax.reducers import Context, Criterion, Reducer
from cropr_jax.reducers.distillation import Prediction
from cropr_jax.reducers.registry import method
from cropr_jax.schedule import Schedule
from cropr_jax.tokens import Tokens, from_features

# Keys folded from an example's key: 0 for drop path, 1 + site for a reducer.
DROP_PATH_KEY = 0
FIRST_SITE_KEY = 1


@dataclasses.dataclass(frozen=True)
class ViTSpec:
    """What tells the variants of an architecture apart; names are those of `ViT`'s attributes."""

    width: int
    depth: int
    heads: int
    patch: int
    mlp: str = "gelu"


# Dosovitskiy et al. 2021, Table 1; Touvron et al. 2021 for Ti and S.
VARIANTS = {
    "ti": ViTSpec(192, 12, 3, 16),
    "s": ViTSpec(384, 12, 6, 16),
    "b": ViTSpec(768, 12, 12, 16),
    "l": ViTSpec(1024, 24, 16, 16),
    "h": ViTSpec(1280, 32, 16, 14),
}


class ViT(nn.Module):
    """Vision Transformer for classification, with a reducer at each site of a schedule.

    The defaults are the plain ViT's; `cropr_jax.models.eva02` says in what EVA-02 differs.

    Attributes:
      image_size: (height, width) in pixels, multiples of the patch.
      patch: (height, width) of a patch in pixels.
      width, depth, heads, mlp_ratio: d, L, attention heads, MLP hidden width over d.
      num_classes: c; with 0 there is no head, and the model returns what a head would see.
      mlp, use_key_bias, rope_reference: see `cropr_jax.models.blocks.Block`.
      prefix: p; the first prefix token is CLS.
      pool: see `pool`; 'cls' normalises before pooling (`norm`), the others after (`fc_norm`).
      layer_scale: initial value, None for no LayerScale.
      drop_path: rate of the last block of the linear rule; the first block has 0.
      drop_path_last_block: rate of the last block. The released code sets 0 whenever Cropr is on,
        so that fusion is never skipped; the unpruned model keeps `drop_path`.
      reduction: name for `cropr_jax.reducers.registry.method`, or 'none'.
      reducer: further arguments of the reducer, as (name, value) pairs.
      schedule: sites and counts.
      fusion: see `cropr_jax.fusion`.
      extra_proj: of a fusion with a new block (`fusion.NewBlock`).
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
    mlp: str = "gelu"
    use_key_bias: bool = True
    rope_reference: tuple[int, int] | None = None
    prefix: int = 1
    pool: str = "mean_all"
    layer_scale: float | None = None
    drop_path: float = 0.0
    drop_path_last_block: float = 0.0
    reduction: str = "none"
    reducer: tuple[tuple[str, Any], ...] = ()
    fusion: str = "none"
    extra_proj: bool = True
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
    def hidden(self) -> int:
        """Hidden width of the MLPs."""
        return int(self.mlp_ratio * self.width)

    @property
    def head_norm(self) -> str:
        """Name of the norm before the head, as weights have it."""
        return "norm" if self.pool == "cls" else "fc_norm"

    @property
    def head_inputs(self) -> int:
        """Vectors of an image that the head sees."""
        return 1

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
    def mlp_inputs(self) -> tuple[int, ...]:
        """Tokens that enter each block's MLP: fewer than the block's after a site in its middle."""
        inputs = self.block_inputs()
        if self.reduction == "none" or self.make_reducer().hook == "after":
            return inputs
        height, width = self.grid
        left = self.schedule.tokens(height * width, self.prefix)
        after = dict(zip(self.schedule.blocks, left, strict=True))
        return tuple(after.get(block, tokens) for block, tokens in enumerate(inputs, start=1))

    @nn.nowrap
    def make_block(self, **kwargs: Any) -> Block:
        """A transformer block of the backbone."""
        block_class = nn.remat(Block, methods=("attend", "feed_forward")) if self.remat else Block
        return block_class(
            heads=self.heads,
            hidden=self.hidden,
            mlp=self.mlp,
            use_key_bias=self.use_key_bias,
            rope_reference=self.rope_reference,
            layer_scale=self.layer_scale,
            prefix=self.prefix,
            attention=self.attention,
            dtype=self.dtype,
            **kwargs,
        )

    @nn.nowrap
    def make_reducer(self, **kwargs: Any) -> Reducer:
        """The reducer of one site."""
        return method(self.reduction)(
            num_outputs=self.num_classes,
            num_queries=self.num_queries,
            slim=self.slim,
            dtype=self.dtype,
            **dict(self.reducer),
            **kwargs,
        )

    @nn.nowrap
    def reducer_losses(self, out: Mapping[str, Any], criterion: Criterion) -> dict[str, jax.Array]:
        """Losses of the sites by name, from what the model returned in training.

        Args:
          out: second output of the model.
          criterion: the task's loss of one site.
        """
        if self.reduction == "none":
            return {}
        return method(self.reduction).losses(out["sites"], criterion)

    @nn.nowrap
    def distillation_losses(self, student: Prediction, teacher: Prediction) -> dict[str, jax.Array]:
        """Losses by name between what the model and its teacher returned for the same images.

        Args:
          student: both outputs of the model in training.
          teacher: both outputs of the unpruned model.
        """
        if self.reduction == "none":
            return {}
        return self.make_reducer().distillation(student, teacher)

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
    ) -> tuple[Float[Array, "b *places c"], Mapping[str, Any]]:
        """Predicts the class of images or, as `Segmenter`, of each of their patches.

        Args:
          images: normalised images of size `image_size`.
          train: run drop path and the training-only branches of the reducers.
          keys: one key per example (`rng.example_keys`); drop path and random reducers need them.

        Returns:
          Float32 logits, and a dict with `auxiliary` (logits [b, n, c] of each site, in training),
          `sites` (all outputs of each site), `kept` and `pruned` (raster indices of each site, in
          descending order of score), `pruned_after` (see `routing.pruned_after`), `features` (the
          tokens that leave each block), `recovered` (of those, in training, what the method brings
          back to all places: `Reducer.recover`), `normed` (the patch tokens at the end, under the
          norm before the head), `embedded`, `pooled` (not of a `Segmenter`), and `pre_logits`, what
          the head sees.
          Methods that merge have `group` [b, h, w] (see `Tokens`) instead of `pruned` and
          `pruned_after`, and -1 in `kept` where a token is no single patch. Under `jit` what is
          unused is free.

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

        left = self.schedule.patches(self.grid[0] * self.grid[1])
        sites, kept, pruned, features, recovered = [], [], [], [], []
        latest = None
        for i, rate in enumerate(self.drop_rates()):
            if i == self.depth - 1 and self.fused:
                tokens = fusion.last_layer_fusion(tokens, pruned)
            is_site = i + 1 in self.schedule.blocks
            reducer = self.make_reducer(name=f"reducer_{len(sites)}") if is_site else None
            block = self.make_block(
                drop_path=rate,
                needs=reducer.needs if reducer else frozenset(),
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
                    keep = left[len(sites)]
                    tokens, gone, out = reducer(tokens, context, keep=keep, train=train)
                    sites.append(out)
                    kept.append(tokens.index)
                    if gone is not None:
                        pruned.append(gone)
            latest = reducer or latest
            if train and latest is not None:
                back = latest.recover(tokens, i)
                recovered += [] if back is None else [back]

        logits, last = self.predict(self.fuse(tokens, pruned), pruned)
        out = {
            "auxiliary": tuple(site["auxiliary"] for site in sites if "auxiliary" in site),
            "sites": tuple(sites),
            "kept": tuple(kept),
            "pruned": tuple(gone.index for gone in pruned),
            "features": tuple(features),
            "recovered": tuple(recovered),
            "embedded": embedded,
            **last,
        }
        if len(pruned) == len(sites):
            survivors = kept[-1] if kept else tokens.index
            out["pruned_after"] = routing.pruned_after(
                survivors, out["pruned"], self.schedule.blocks, self.grid
            )
        if tokens.group is not None:
            out["group"] = tokens.group.reshape(-1, *self.grid)
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

    def fuse(self, tokens: Tokens, pruned: Sequence[Tokens]) -> Tokens:
        """What fusion does after the last block."""
        if not self.schedule.sites:
            return tokens
        if self.fusion == "token_concat":
            return fusion.token_concat(tokens, pruned)
        if self.fusion in fusion.NEW_BLOCKS:
            new = fusion.NEW_BLOCKS[self.fusion]
            block = self.make_block(parent=None)
            return new(block, self.extra_proj, self.dtype, name="fusion")(tokens, pruned)
        return tokens

    def predict(
        self, tokens: Tokens, pruned: Sequence[Tokens]
    ) -> tuple[Float[Array, "b *places c"], dict[str, jax.Array]]:
        """Logits, and `pooled`, `normed` and `pre_logits` (see `__call__`).

        Args:
          tokens: after fusion.
          pruned: of every site, for heads that predict for them.

        The head sees the pooled features normalised; with pool='cls' the norm comes before pooling.
        """
        norm = LayerNorm(dtype=self.dtype, name=self.head_norm)
        normed = norm(tokens.x)
        if self.pool == "cls":
            pooled = features = pool(tokens.replace(x=normed), self.pool)
        else:
            pooled = pool(tokens, self.pool)
            features = norm(pooled)
        out = {"normed": normed[:, self.prefix :], "pooled": pooled, "pre_logits": features}
        return self.project(features), out

    def project(self, features: Float[Array, "b *places d"]) -> Float[Array, "b *places c"]:
        """The linear head; without one the features themselves, in float32."""
        if not self.num_classes:
            return features.astype(jnp.float32)
        head = nn.Dense(
            self.num_classes,
            dtype=self.dtype,
            kernel_init=nn.initializers.normal(self.head_init_std),
            name="head",
        )
        return head(features).astype(jnp.float32)
