"""What a model consists of: its attributes, and the sizes and parts that follow from them.

Nothing is computed here. Letters: p prefix tokens, m = h*w patch tokens, d width, L depth,
c classes, n queries.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from cropr_jax.core import trees
from cropr_jax.core.layers import Dtype
from cropr_jax.core.reducer import Criterion, Prediction, Reducer
from cropr_jax.core.schedule import Schedule
from cropr_jax.models.blocks import Block
from cropr_jax.reducers.registry import method


class Anatomy(nn.Module):
    """The attributes of a Vision Transformer with a reducer at each site of a schedule.

    The defaults are the plain ViT's; `cropr_jax.models.eva02` says in what EVA-02 differs.

    Attributes:
      image_size: (height, width) in pixels, multiples of the patch.
      patch: (height, width) of a patch in pixels.
      width, depth, heads, mlp_ratio: d, L, attention heads, MLP hidden width over d.
      num_classes: c; with 0 there is no linear head, and the model returns what it would see.
      mlp, use_key_bias, rope_reference: see `cropr_jax.models.blocks.Block`.
      prefix: p; the first prefix token is CLS.
      layer_scale: initial value, None for no LayerScale.
      drop_path: rate of the last block of the linear rule; the first block has 0.
      drop_path_last_block: rate of the last block. The released code sets 0 whenever Cropr is on,
        so that fusion is never skipped; the unpruned model keeps `drop_path`.
      reduction: name for `cropr_jax.reducers.registry.method`, or 'none'.
      reducer_options: of the method, as (name, value) pairs.
      schedule: sites and counts.
      fusion: see `cropr_jax.core.fusion`.
      extra_proj: of a fusion with a new block (`fusion.NewBlock`).
      num_queries: n of every site.
      head_init_std: of the linear head; 0.02 as released, 2e-5 in MAE's fine-tuning.
      remat: recompute block activations in the backward pass.
      attention: 'auto', 'xla' or 'cudnn'.
      slim: inference form (`cropr_jax.models.slim`).
      dtype: compute dtype.

    Class attributes, which a head sets:
      fusions: that go with it (`cropr_jax.core.fusion`).
      dense: whether it predicts at every patch, pruned ones too.
      fresh: modules that may start fresh where weights do not have them.
    """

    image_size: tuple[int, int]
    patch: tuple[int, int]
    width: int
    depth: int
    heads: int
    num_classes: int
    schedule: Schedule
    mlp_ratio: float | int = 4.0
    mlp: str = "gelu"
    use_key_bias: bool = True
    rope_reference: tuple[int, int] | None = None
    prefix: int = 1
    layer_scale: float | int | None = None
    drop_path: float | int = 0.0
    drop_path_last_block: float | int = 0.0
    reduction: str = "none"
    reducer_options: tuple[tuple[str, Any], ...] = ()
    fusion: str = "none"
    extra_proj: bool = True
    num_queries: int = 1
    head_init_std: float | int = 0.02
    remat: bool = False
    attention: str = "auto"
    slim: bool = False
    dtype: Dtype = jnp.float32

    fusions: ClassVar[tuple[str, ...]] = ()
    dense: ClassVar[bool] = False
    fresh: ClassVar[tuple[str, ...]] = (trees.SITE, "fusion/", "head/", "fc_norm/", "norm/")

    @classmethod
    def check(cls, fields: dict[str, Any], grid: tuple[int, int]) -> None:
        """Checks and completes the fields of a model with this head.

        Args:
          fields: of the model, to be changed.
          grid: (h, w) of the patches.

        Raises:
          ConfigError: naming the field.
        """

    @property
    def grid(self) -> tuple[int, int]:
        """(h, w), the patch grid."""
        return self.image_size[0] // self.patch[0], self.image_size[1] // self.patch[1]

    @property
    def hidden(self) -> int:
        """Hidden width of the MLPs."""
        return int(self.mlp_ratio * self.width)

    @property
    def patches(self) -> int:
        """m = h*w, the patch tokens of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def needs_cls(self) -> str:
        """What of the head needs a CLS token, in words; empty if nothing does."""
        return ""

    @property
    def head_norm(self) -> str:
        """Name of the norm before the linear head, as weights have it."""
        raise NotImplementedError(f"{type(self).__name__} has no linear head")

    @nn.nowrap
    def input_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """What `__call__` takes in training, by name, as shapes and types."""
        shape = (batch_size, *self.image_size, 3)
        return {"image": jax.ShapeDtypeStruct(shape, jnp.float32)}

    @nn.nowrap
    def head_macs(self) -> int:
        """Multiply-accumulates of the head for one image."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its head costs")

    @nn.nowrap
    def full_precision(self, name: str) -> bool:
        """Whether a parameter is used in float32 whatever the compute dtype: sites and norms are.

        Args:
          name: '/'-joined.
        """
        return trees.of_site(name) or any("norm" in part for part in name.split("/")[:-1])

    @property
    def fused(self) -> bool:
        """Whether the last block sees all tokens."""
        return self.fusion == "llf" and bool(self.schedule.sites)

    @nn.nowrap
    def block_inputs(self) -> tuple[int, ...]:
        """Tokens that enter each block, the prefix counted."""
        return self.schedule.block_inputs(self.patches, self.prefix, self.fused)

    @nn.nowrap
    def mlp_inputs(self) -> tuple[int, ...]:
        """Tokens that enter each block's MLP: fewer than the block's after a site in its middle."""
        inputs = self.block_inputs()
        if self.reduction == "none" or self.make_reducer().hook == "after":
            return inputs
        left = self.schedule.tokens(self.patches, self.prefix)
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
            **dict(self.reducer_options),
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
