"""Semantic segmentation: targets, main and auxiliary loss, mIoU.

Letters: b images, h and w patch grid, n queries, c classes; `height` and `width` are pixels.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from cropr_jax.core.layers import upsample
from cropr_jax.data.records import MAP, Example, Record, Source
from cropr_jax.errors import ConfigError
from cropr_jax.host.schema import FLAG, SIDE, SIZE, Field, Section, number, several, whole
from cropr_jax.models import Segmenter, Trunk
from cropr_jax.tasks.base import PREPROCESS, Batch, Inputs, Losses, Metric, Task, total
from cropr_jax.tasks.segmentation import evaluation
from cropr_jax.tasks.segmentation.evaluation import MeanIoU, cross_entropy
from cropr_jax.tasks.segmentation.predictor import SegmentationPredictor

Targets = dict[str, jax.Array]


def make_targets(labels: Integer[Array, "b height width"], patch: tuple[int, int]) -> Targets:
    """What the losses compare with.

    Args:
      labels: class of each pixel of the model's input, 255 where none counts.
      patch: (height, width) of a patch in pixels.

    Returns:
      `pixels` int32 [b, height, width], for the main loss; and `grid` int32 [b, h*w], for all
      auxiliary ones: the label of the top-left pixel of each patch, as PyTorch's 'nearest' picks it
      (benbergner/cropr: segm/engine.py; that of `jax.image.resize` is another pixel).
    """
    rows, columns = patch
    pixels = labels.astype(jnp.int32)
    grid = pixels[:, ::rows, ::columns]
    return {"pixels": pixels, "grid": grid.reshape(grid.shape[0], -1)}


@dataclasses.dataclass(frozen=True)
class Segmentation(Task):
    """One class for each pixel."""

    name: ClassVar[str] = "segmentation"
    metric: ClassVar[Metric] = Metric("miou", "mIoU")
    fractions: ClassVar[frozenset[str]] = frozenset(
        {"miou", "macc", "aacc", "iou", "accuracy", "pixels"}
    )
    main_loss: ClassVar[str] = "cross-entropy of pixels"
    head: ClassVar[type[Trunk]] = Segmenter
    predictor: ClassVar[type[SegmentationPredictor]] = SegmentationPredictor
    labels: ClassVar[str] = MAP
    made_up: ClassVar[str] = "fake_segmentation"
    fields: ClassVar[Mapping[str, Section]] = {
        "data": {
            "ignore": Field(whole(0, 255), "id in the masks that does not count", False),
            "zero_is_ignored": Field(FLAG, "whether that is 0", False),
        },
        "preprocess": PREPROCESS
        | {"eval_stride": Field(SIZE, "pixels between windows of evaluation", False)},
        "preprocess.train": {
            "resize_base": Field(several(SIDE, 2), "long and short side of the box at ratio 1"),
            "ratio_range": Field(
                several(number(0, 100, above=True), 2, rising=True), "of the random sizes"
            ),
            "cat_max_ratio": Field(
                number(0, 1, above=True), "largest share of one class in a crop"
            ),
            "flip": Field(FLAG, "mirror every second image"),
            "photometric": Field(FLAG, "change brightness, contrast, saturation and hue"),
        },
    }

    def check(self, config: Mapping[str, Any], model: Trunk, source: Source) -> None:
        super().check(config, model, source)
        if source.num_classes < model.num_classes:
            raise ConfigError(
                f"config.model.num_classes: {model.num_classes}, but the data set names "
                f"{source.num_classes} classes, and the results are by class: set 0 to take their "
                "number from the data"
            )

    def train_transform(
        self, preprocess: Mapping[str, Any]
    ) -> Callable[[Record, np.random.Generator], Example]:
        from cropr_jax.data import segmentation

        return segmentation.train_transform(preprocess)

    def eval_transform(
        self, preprocess: Mapping[str, Any], source: Source
    ) -> Callable[[Record], Example]:
        from cropr_jax.data import segmentation

        return segmentation.eval_transform(preprocess, source)

    def filler(
        self, preprocess: Mapping[str, Any], source: Source, *, train: bool = False
    ) -> Example:
        from cropr_jax.data import segmentation

        return segmentation.filler(preprocess, source, train=train)

    def prepare(self, batch: Batch, model: Trunk, key: jax.Array) -> tuple[Inputs, Targets]:
        """Images as they are, and `make_targets` of their labels; nothing is drawn."""
        return {"image": batch["image"]}, make_targets(batch["label"], model.patch)

    def predicted_targets(self, prediction: Float[Array, "b h w c"], model: Trunk) -> Targets:
        """The classes that a model predicts for the pixels."""
        labels = upsample(prediction, model.image_size).argmax(-1)
        return make_targets(labels, model.patch)

    def criterion(
        self,
        logits: Float[Array, "b n c"],
        places: Int[Array, "b n"] | None,
        targets: Targets,
    ) -> Float[Array, ""]:
        """Cross-entropy of patches; without `places` queries are all of them in raster order."""
        grid = targets["grid"]
        if places is not None:
            grid = jnp.take_along_axis(grid, places, axis=1)
        return cross_entropy(logits, grid)

    def losses(
        self,
        prediction: Float[Array, "b h w c"],
        extra: Mapping[str, Float[Array, ""]],
        targets: Targets,
    ) -> tuple[Float[Array, ""], Losses]:
        """Main loss, on logits resized to the pixels, plus every loss of the reducers.

        Source: `benbergner/cropr: segm/engine.py`. With gradient accumulation the mean is over the
        pixels of each micro-batch.
        """
        pixels = targets["pixels"]
        main = cross_entropy(upsample(prediction, (pixels.shape[1], pixels.shape[2])), pixels)
        return total(main, extra)

    def measure(self, apply: Callable[[Inputs], Any], batch: Batch) -> dict[str, jax.Array]:
        logits = evaluation.predict(lambda images: apply({"image": images}), batch)
        return evaluation.evaluation_sums(logits, batch)

    def evaluator(self, source: Source) -> MeanIoU:
        return MeanIoU(source.class_names)

    def example_batch(self, model: Trunk, size: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(0)
        shape = (size, *model.image_size)
        return {
            "image": random.standard_normal((*shape, 3), np.float32),
            "label": random.integers(model.num_classes, size=shape, dtype=np.uint8),
            "id": np.arange(size, dtype=np.int32),
        }

    def card(self, config: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        train = config["preprocess"]["train"]
        low, high = train["ratio_range"]
        rows = [
            (
                "crops",
                f"of images in {'x'.join(map(str, train['resize_base']))} times {low:g} to "
                f"{high:g}, one class below {train['cat_max_ratio']:.0%}",
            )
        ]
        if stride := config["preprocess"].get("eval_stride"):
            windows = f"windows every {'x'.join(map(str, stride))} pixels, a pass each"
            rows.append(("evaluation", windows))
        return rows
