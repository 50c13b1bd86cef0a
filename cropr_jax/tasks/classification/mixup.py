"""Mixup and CutMix with timm's semantics, inside the jitted step.

Source: timm 1.0.3 `timm/data/mixup.py` (`Mixup`, mode "batch"), as used by MAE and by
`benbergner/cropr: cls/main.py`. An image is mixed with its mirror in the group (the first with the
last), by one coefficient and either blending (mixup) or one pasted box (CutMix) for the group.

timm's group is the loader's batch. Here a group is `group` consecutive images of the global batch,
so that neither devices nor micro-batches change who is mixed with whom.

Letters: b images, g groups, h w pixels, c classes.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from cropr_jax.errors import ConfigError
from cropr_jax.host.schema import SHARE, Field, Section, check_values, number, whole

_ALPHA = number(0, 1000)
FIELDS: Section = {
    "mixup": Field(_ALPHA, "alpha of mixup's Beta distribution; 0 for no mixup"),
    "cutmix": Field(_ALPHA, "the same of CutMix"),
    "switch_prob": Field(SHARE, "probability of CutMix where both are on"),
    "group": Field(whole(1, 2**24), "images that share one draw"),
    "label_smoothing": Field(number(0, 1, below=True), "mass that is spread over all classes"),
}


@dataclasses.dataclass(frozen=True)
class MixupConfig:
    """Strengths of mixing.

    Attributes:
      mixup: alpha of the Beta distribution of mixup's coefficient, 0 for no mixup.
      cutmix: the same of CutMix.
      switch_prob: probability of CutMix where both are on.
      group: images that share one draw (512 in the released Cropr runs).
      label_smoothing: mass spread evenly over all classes.
    """

    mixup: float | int = 0.8
    cutmix: float | int = 1.0
    switch_prob: float | int = 0.5
    group: int = 512
    label_smoothing: float | int = 0.1

    def __post_init__(self):
        check_values("config.mixup", FIELDS, dataclasses.asdict(self))

    @property
    def active(self) -> bool:
        """Whether images are mixed at all."""
        return self.mixup > 0 or self.cutmix > 0

    def groups(self, batch: int) -> int:
        """Groups in a batch of `batch` images; a batch smaller than a group is one group.

        Raises:
          ConfigError: if groups do not fill the batch, or a group has an odd count, so that its
            middle image would be mixed with itself.
        """
        size = min(self.group, batch)
        if size < 2 or batch % size or size % 2:
            raise ConfigError(
                f"config.mixup.group = {self.group} does not cut a batch of {batch} images into "
                "equal groups of an even number of images: choose an even divisor of batch_size"
            )
        return batch // size


class Draw(NamedTuple):
    """What chance decides for each group."""

    weight: Float[Array, "g"]  # share of the image itself in pixels (mixup) and target
    cut: Bool[Array, "g"]  # CutMix instead of mixup
    box: Int[Array, "g 4"]  # top, bottom, left, right of the pasted box, ends excluded


def cut_box(
    weight: Float[Array, ""], row: Int[Array, ""], column: Int[Array, ""], size: tuple[int, int]
) -> tuple[Int[Array, "4"], Float[Array, ""]]:
    """Box of CutMix for a drawn coefficient and centre, clipped at the border of the image.

    Sides are `int(side * sqrt(1 - weight))`, halved with rounding down on both sides of the
    centre, as in timm's `rand_bbox`.

    Returns:
      The box as top, bottom, left, right, and the coefficient that its area stands for.
    """
    height, width = size
    ratio = jnp.sqrt(1.0 - weight)
    half_h = (height * ratio).astype(jnp.int32) // 2
    half_w = (width * ratio).astype(jnp.int32) // 2
    top, bottom = jnp.clip(row - half_h, 0, height), jnp.clip(row + half_h, 0, height)
    left, right = jnp.clip(column - half_w, 0, width), jnp.clip(column + half_w, 0, width)
    area = ((bottom - top) * (right - left)).astype(jnp.float32)
    return jnp.stack([top, bottom, left, right]), 1.0 - area / (height * width)


def draw(config: MixupConfig, key: Key[Array, ""], groups: int, size: tuple[int, int]) -> Draw:
    """One draw for each group, from a key that is folded with the group's index.

    Args:
      config: strengths, at least one of which is not 0.
      key: key of the step.
      groups: number of groups in the global batch.
      size: height and width of the images in pixels.
    """
    if config.mixup > 0 and config.cutmix > 0:
        switch_prob = config.switch_prob
    else:
        switch_prob = float(config.cutmix > 0)

    def one(index: Int[Array, ""]) -> Draw:
        choices, shares = jax.random.split(jax.random.fold_in(key, index))
        switch, row, column = jax.random.uniform(choices, (3,))
        cut = switch < switch_prob
        # Beta(alpha, alpha) from two gammas of one call: `jax.random.beta` makes two, and sampling
        # loops are slow to compile.
        first, second = jax.random.loggamma(
            shares, jnp.where(cut, config.cutmix, config.mixup), (2,)
        )
        weight = jax.nn.sigmoid(first - second)
        row = (row * size[0]).astype(jnp.int32)
        column = (column * size[1]).astype(jnp.int32)
        box, of_area = cut_box(weight, row, column, size)
        return Draw(jnp.where(cut, of_area, weight), cut, box)

    return jax.vmap(one)(jnp.arange(groups))


def smooth_targets(labels: Int[Array, "b"], classes: int, smoothing: float) -> Float[Array, "b c"]:
    """One-hot targets with `smoothing / classes` everywhere and the rest on the label."""
    off = smoothing / classes
    return jax.nn.one_hot(labels, classes, dtype=jnp.float32) * (1.0 - smoothing) + off


def partners(
    images: Float[Array, "b h w 3"], labels: Int[Array, "b"], groups: int
) -> tuple[Float[Array, "b h w 3"], Int[Array, "b"]]:
    """Image and label of each image's mirror in its group.

    Labels ride in a column beside the pixels, so that a batch sharded over devices is exchanged
    by one collective permute, not two. (Class numbers are exact in float32.)
    """
    b, *shape = images.shape
    packed = jnp.concatenate([images.reshape(b, -1), labels.astype(images.dtype)[:, None]], axis=1)
    packed = packed.reshape(groups, b // groups, -1)[:, ::-1].reshape(b, -1)
    return packed[:, :-1].reshape(b, *shape), packed[:, -1].astype(labels.dtype)


def apply(
    drawn: Draw,
    images: Float[Array, "b h w 3"],
    labels: Int[Array, "b"],
    classes: int,
    smoothing: float,
) -> tuple[Float[Array, "b h w 3"], Float[Array, "b c"]]:
    """Mixes a batch by given draws; nothing random happens here.

    Args:
      drawn: one entry for each group of `b / g` consecutive images.
      images: float32 pixels, normalised.
      labels: class numbers.
      classes: number of classes.
      smoothing: label smoothing, applied before the mixing of targets.
    """
    groups = drawn.weight.shape[0]
    b, height, width, _ = images.shape
    other, other_labels = partners(images, labels, groups)

    rows = jnp.arange(height)[None, :, None]
    columns = jnp.arange(width)[None, None, :]
    top, bottom, left, right = (edge[:, None, None] for edge in drawn.box.T)
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    cut = drawn.cut[:, None, None]
    own = jnp.where(cut, 1.0 - inside, drawn.weight[:, None, None])  # [g, h, w]

    def spread(per_group: jax.Array) -> jax.Array:
        return jnp.repeat(per_group, b // groups, axis=0)

    share = spread(own)[..., None].astype(images.dtype)
    mixed = images * share + other * (1.0 - share)
    weight = spread(drawn.weight)[:, None]
    targets = smooth_targets(labels, classes, smoothing) * weight
    targets += smooth_targets(other_labels, classes, smoothing) * (1.0 - weight)
    return mixed, targets


def mix(
    config: MixupConfig,
    key: Key[Array, ""],
    images: Float[Array, "b h w 3"],
    labels: Int[Array, "b"],
    classes: int,
) -> tuple[Float[Array, "b h w 3"], Float[Array, "b c"]]:
    """Draws and mixes a global batch; without mixup and CutMix only the labels are smoothed."""
    if not config.active:
        return images, smooth_targets(labels, classes, config.label_smoothing)
    drawn = draw(config, key, config.groups(images.shape[0]), (images.shape[1], images.shape[2]))
    return apply(drawn, images, labels, classes, config.label_smoothing)
