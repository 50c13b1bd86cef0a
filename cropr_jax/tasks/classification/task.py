"""Classification: targets, main and auxiliary loss, accuracy.

Letters: b images, n queries, c classes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cropr_jax.data.records import CLASS, FILTERS, Example, Record, Source
from cropr_jax.host.schema import (
    FLAG,
    SECTION,
    SHARE,
    TEXT,
    Field,
    Section,
    choice,
    either,
    number,
    optional,
    several,
)
from cropr_jax.models import Classifier, Trunk
from cropr_jax.tasks.base import PREPROCESS, Batch, Inputs, Losses, Metric, Result, Task, total
from cropr_jax.tasks.classification import mixup
from cropr_jax.tasks.classification.mixup import MixupConfig
from cropr_jax.tasks.classification.predictor import ClassificationPredictor


def cross_entropy(
    logits: Float[Array, "*b c"], targets: Float[Array, "*b c"]
) -> Float[Array, "*b"]:
    """Soft-target cross-entropy of each row, in float32."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.sum(targets * log_p, axis=-1)


def rank_of_label(logits: Float[Array, "b c"], labels: Int[Array, "b"]) -> Int[Array, "b"]:
    """Classes that come before the label: 0 where it is the prediction.

    Of equal logits the lower class comes first, as with argmax. A row with a NaN ranks its label
    last: a broken model must not be counted as right.
    """
    own = jnp.take_along_axis(logits, labels[:, None], axis=1)
    classes = jnp.arange(logits.shape[1])[None, :]
    before = (logits > own) | ((logits == own) & (classes < labels[:, None]))
    broken = jnp.isnan(logits).any(axis=1)
    return jnp.where(broken, logits.shape[1], before.sum(axis=1))


def accuracy_sums(logits: Float[Array, "b c"], batch: Batch) -> dict[str, jax.Array]:
    """Sums over the real examples of a batch: count, right ones, loss.

    Counts are integers, so that they are exact however the examples are cut into batches.

    Args:
      logits: of the head.
      batch: `label` int [b], and `mask`, 0 for examples that only fill the batch.
    """
    labels, mask = batch["label"], batch["mask"] > 0
    rank = rank_of_label(logits, labels)
    targets = jax.nn.one_hot(labels, logits.shape[1], dtype=jnp.float32)
    loss = jnp.where(mask, cross_entropy(logits, targets), 0.0)
    return {
        "count": mask.sum(dtype=jnp.int32),
        "top1": (mask & (rank < 1)).sum(dtype=jnp.int32),
        "top5": (mask & (rank < 5)).sum(dtype=jnp.int32),
        "loss": loss.sum(),
    }


class Accuracy:
    """Evaluator: top-1 and top-5 accuracy and mean loss over all images of a split."""

    NAMES = ("top1", "top5", "loss")

    def __init__(self):
        self._count = 0
        self._sums = dict.fromkeys(self.NAMES, 0.0)

    def add(self, outputs: Mapping[str, Any]) -> None:
        """Takes up the `accuracy_sums` of a batch."""
        self._count += int(outputs["count"])
        for name in self.NAMES:
            self._sums[name] += float(outputs[name])

    def result(self) -> Result:
        """Fractions, and the mean loss."""
        if not self._count:
            raise ValueError("evaluation saw no example: the split is empty or wholly masked")
        metrics = {name: value / self._count for name, value in self._sums.items()}
        return Result({**metrics, "examples": self._count})


@dataclasses.dataclass(frozen=True)
class Classification(Task):
    """One class for each image.

    Attributes:
      mixing: mixup, CutMix and label smoothing.
    """

    mixing: MixupConfig = MixupConfig(mixup=0.0, cutmix=0.0, label_smoothing=0.0)

    name: ClassVar[str] = "classification"
    metric: ClassVar[Metric] = Metric("top1", "accuracy")
    fractions: ClassVar[frozenset[str]] = frozenset({"top1", "top5"})
    main_loss: ClassVar[str] = "cross-entropy"
    head: ClassVar[type[Trunk]] = Classifier
    predictor: ClassVar[type[ClassificationPredictor]] = ClassificationPredictor
    labels: ClassVar[str] = CLASS
    made_up: ClassVar[str] = "fake"
    fields: ClassVar[Mapping[str, Section]] = {
        "": {"mixup": Field(SECTION, "how images and labels are mixed")},
        "mixup": mixup.FIELDS,
        "preprocess": PREPROCESS
        | {
            "interpolation": Field(choice(*FILTERS), "how images are resized"),
            "crop_ratio": Field(
                either(choice("none"), number(0, 1, above=True)),
                "share of the resized image that evaluation sees, 'none' without resizing",
            ),
        },
        "preprocess.train": {
            "crop_scale": Field(
                optional(several(number(0, 1, above=True), 2, rising=True), "no random crop"),
                "share of the image that a random crop covers",
            ),
            "flip": Field(FLAG, "mirror every second image"),
            "rand_augment": Field(TEXT, "policy such as 'rand-m9-mstd0.5-inc1'; empty for none"),
            "erase": Field(SHARE, "probability of random erasing"),
        },
    }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Classification":
        return cls(MixupConfig(**config["mixup"])) if "mixup" in config else cls()

    def check(self, config: Mapping[str, Any], model: Trunk, source: Source) -> None:
        super().check(config, model, source)
        if self.mixing.active:
            self.mixing.groups(config["batch_size"])

    def train_transform(
        self, preprocess: Mapping[str, Any]
    ) -> Callable[[Record, np.random.Generator], Example]:
        from cropr_jax.data import classification

        return classification.train_transform(preprocess)

    def eval_transform(
        self, preprocess: Mapping[str, Any], source: Source
    ) -> Callable[[Record], Example]:
        from cropr_jax.data import classification

        return classification.eval_transform(preprocess)

    def filler(
        self, preprocess: Mapping[str, Any], source: Source, *, train: bool = False
    ) -> Example:
        from cropr_jax.data import classification

        return classification.filler(preprocess)

    def prepare(
        self, batch: Batch, model: Trunk, key: jax.Array
    ) -> tuple[Inputs, Float[Array, "b c"]]:
        """Mixed images and their distributions over the classes."""
        images, targets = mixup.mix(
            self.mixing, key, batch["image"], batch["label"], model.num_classes
        )
        return {"image": images}, targets

    def predicted_targets(
        self, prediction: Float[Array, "b c"], model: Trunk
    ) -> Float[Array, "b c"]:
        """Probabilities in float32."""
        return jax.nn.softmax(prediction.astype(jnp.float32), axis=-1)

    def criterion(
        self,
        logits: Float[Array, "b n c"],
        places: Int[Array, "b n"] | None,
        targets: Float[Array, "b c"],
    ) -> Float[Array, ""]:
        """With several queries each of them predicts the class, whatever its place."""
        return cross_entropy(logits, jnp.broadcast_to(targets[:, None], logits.shape)).mean()

    def losses(
        self,
        prediction: Float[Array, "b c"],
        extra: Mapping[str, Float[Array, ""]],
        targets: Float[Array, "b c"],
    ) -> tuple[Float[Array, ""], Losses]:
        """All on the same (mixed, smoothed) targets. Source: `benbergner/cropr: cls/engine.py`."""
        return total(cross_entropy(prediction, targets).mean(), extra)

    def measure(self, apply: Callable[[Inputs], Any], batch: Batch) -> dict[str, jax.Array]:
        return accuracy_sums(apply({"image": batch["image"]}), batch)

    def evaluator(self, source: Source) -> Accuracy:
        return Accuracy()

    def example_batch(self, model: Trunk, size: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(0)
        return {
            "image": random.standard_normal((size, *model.image_size, 3), np.float32),
            "label": random.integers(model.num_classes, size=size, dtype=np.int32),
            "id": np.arange(size, dtype=np.int32),
        }

    def card(self, config: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        mixing = ", ".join(f"{name} {value:g}" for name, value in config["mixup"].items())
        return (("mixing", mixing),)
