"""The trunk of every model: a Vision Transformer with token reduction between its blocks.

A head is a subclass of `Trunk` that makes a prediction of what the trunk encoded.

Letters: b batch, p prefix tokens, m = h*w patch tokens, t tokens, d width, c classes, k kept.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import linen as nn
from jaxtyping import Array, Float, Int, Key

from cropr_jax.core import fusion, rng, routing, trees
from cropr_jax.core.barrier import gradient_barrier
from cropr_jax.core.layers import sincos_positions
from cropr_jax.core.reducer import Context, Prediction, Reducer
from cropr_jax.models.anatomy import Anatomy
from cropr_jax.models.blocks import PatchEmbed
from cropr_jax.tokens import Tokens, from_features

# Keys folded from an example's key: 0 for drop path, 1 + site for a reducer, and one for the head.
DROP_PATH_KEY = 0
FIRST_SITE_KEY = 1
HEAD_KEY = 2**16


class Encoded(NamedTuple):
    """What the trunk makes of images.

    Attributes:
      tokens: that leave the last block, fused.
      pruned: tokens of every site, as they were when it pruned them; of methods that merge none.
      kept: raster indices [b, k] that every site kept.
      sites: what every site gave off, of which `auxiliary` in training.
      features: [b, t, d] that leave each block.
      embedded: [b, t, d] that enter the first.
      recovered: of `features`, in training, what the method brings back to all places
        (`Reducer.recover`).
    """

    tokens: Tokens
    pruned: tuple[Tokens, ...]
    kept: tuple[Int[Array, "b k"], ...]
    sites: tuple[dict[str, Any], ...]
    features: tuple[Float[Array, "b t d"], ...]
    embedded: Float[Array, "b t d"]
    recovered: tuple[Float[Array, "b m d"], ...]


class Passed(NamedTuple):
    """Tokens that left a block and its site, and the reducer of the latest site until there."""

    reducer: Reducer | None
    tokens: Tokens


class Trunk(Anatomy):
    """A Vision Transformer with a reducer at each site of its schedule; a subclass adds a head."""

    @nn.compact
    def __call__(
        self,
        inputs: Float[Array, "b height width 3"] | Mapping[str, Any],
        *,
        train: bool = False,
        keys: Key[Array, "b"] | None = None,
    ) -> Prediction:
        """What the head predicts of images.

        Args:
          inputs: `image` [b, height, width, 3], normalised, of size `image_size`, and whatever else
            the head reads, by name; or the images alone.
          train: run drop path and the training-only branches of the reducers.
          keys: one key per example (`rng.example_keys`); drop path and random reducers need them.

        Returns:
          The prediction, and a dict with `auxiliary` (logits [b, n, c] of each site, in training),
          `sites` (all outputs of each site), `kept` and `pruned` (raster indices of each site, in
          descending order of score), `pruned_after` (see `routing.pruned_after`), `features`,
          `embedded` and `recovered` (see `Encoded`), and what the head adds: of linear heads
          `normed` (the patch tokens at the end, under the norm before the head), `pre_logits`, what
          the head sees, and `pooled`.
          Methods that merge have `group` [b, h, w] (see `Tokens`) instead of `pruned` and
          `pruned_after`, and -1 in `kept` where a token is no single patch. Under `jit` what is
          unused is free.

        Raises:
          ValueError: if the images have another size, or random numbers are needed without keys.
        """
        named = inputs if isinstance(inputs, Mapping) else {"image": inputs}
        encoded = self.encode(named["image"], train=train, keys=keys)
        of_head = None if keys is None else rng.fold(keys, HEAD_KEY)
        prediction, last = self.predict(encoded, named, train=train, keys=of_head)
        out = {
            "auxiliary": tuple(out["auxiliary"] for out in encoded.sites if "auxiliary" in out),
            "sites": encoded.sites,
            "kept": encoded.kept,
            "pruned": tuple(gone.index for gone in encoded.pruned),
            "features": encoded.features,
            "recovered": encoded.recovered,
            "embedded": encoded.embedded,
            **last,
        }
        if len(encoded.pruned) == len(encoded.sites):
            survivors = encoded.kept[-1] if encoded.kept else encoded.tokens.index
            out["pruned_after"] = routing.pruned_after(
                survivors, out["pruned"], self.schedule.blocks, self.grid
            )
        if encoded.tokens.group is not None:
            out["group"] = encoded.tokens.group.reshape(-1, *self.grid)
        return prediction, out

    def predict(
        self,
        encoded: Encoded,
        inputs: Mapping[str, Any],
        *,
        train: bool,
        keys: Key[Array, "b"] | None,
    ) -> Prediction:
        """The head: a prediction, any tree of arrays, and further outputs.

        Args:
          encoded: of the trunk.
          inputs, train: as for `__call__`.
          keys: of the head alone.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no head")

    def encode(
        self,
        images: Float[Array, "b height width 3"],
        *,
        train: bool,
        keys: Key[Array, "b"] | None,
    ) -> Encoded:
        """All blocks, sites and the fusion; arguments as for `__call__`."""
        if images.shape[1:3] != self.image_size:
            raise ValueError(
                f"images are {images.shape[1]} x {images.shape[2]} but the model was built for "
                f"{self.image_size[0]} x {self.image_size[1]}"
            )
        rows, columns = self.patch
        pixels = rearrange(images, "b (h ph) (w pw) c -> b (h w) (ph pw c)", ph=rows, pw=columns)
        tokens = self.embed(pixels)
        embedded, draws = tokens.x, self.draw_drop_path(train, keys)
        sites, kept, pruned, features, passed = [], [], [], [], []
        latest = None

        def enter(tokens: Tokens) -> Tokens:
            return tokens.replace(x=gradient_barrier(tokens.x)) if train else tokens

        for i, rate in enumerate(self.drop_rates()):
            if i == self.depth - 1 and self.fused:
                tokens = fusion.last_layer_fusion(tokens, pruned)
            is_site = i + 1 in self.schedule.blocks
            reducer = self.make_reducer(name=trees.site_name(len(sites))) if is_site else None
            needs = reducer.needs if reducer else frozenset()
            block = self.make_block(drop_path=rate, needs=needs, name=f"block_{i}")
            draw = (None, None) if draws is None else (draws[:, i, 0], draws[:, i, 1])

            tokens, extras = block.attend(enter(tokens), draw[0])
            for hook in ("middle", "after"):
                if hook == "after":
                    tokens = block.feed_forward(enter(tokens), draw[1])
                    features.append(tokens.x)
                if reducer and reducer.hook == hook:
                    context = self.context(len(sites), pixels, extras, reducer, keys)
                    keep = self.schedule.patches(self.patches)[len(sites)]
                    tokens, gone, out = reducer(tokens, context, keep=keep, train=train)
                    sites.append(out)
                    kept.append(tokens.index)
                    pruned += [] if gone is None else [gone]
            latest = reducer or latest
            passed.append(Passed(latest, tokens))
        return Encoded(
            tokens=self.fuse(tokens, pruned),
            pruned=tuple(pruned),
            kept=tuple(kept),
            sites=tuple(sites),
            features=tuple(features),
            embedded=embedded,
            recovered=self.recover(passed) if train else (),
        )

    def recover(self, passed: Sequence[Passed]) -> tuple[Float[Array, "b m d"], ...]:
        """What the reducers bring back to all places of the image, from the first site on."""
        asked = [
            reducer.recover(tokens, block)
            for block, (reducer, tokens) in enumerate(passed)
            if reducer is not None
        ]
        return tuple(found for found in asked if found is not None)

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
