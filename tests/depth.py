"""Depth of every patch, on made-up scenes, darker where nearer: a third task."""

import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cropr_jax import tasks
from cropr_jax.data import preprocess
from cropr_jax.data.open import READERS
from cropr_jax.models import Segmenter
from cropr_jax.tasks.base import PREPROCESS, Metric, Result, Task, total
from cropr_jax.tasks.predictor import Predictor, read


@dataclasses.dataclass(frozen=True)
class Scenes:
    """Example i: an image uint8 [h, w, 3] and its depth float32 [h, w] in metres, 1 to 9."""

    num_examples: int
    image_size: tuple[int, int]
    kind, class_names = "depth maps", ("depth",)

    def __len__(self):
        return self.num_examples

    def __call__(self, index):
        rng = np.random.default_rng(index)
        depth = np.kron(rng.uniform(1, 9, (4, 4)), np.ones(np.array(self.image_size) // 4))
        image = 25 * depth[..., None] + rng.uniform(0, 30, (*self.image_size, 3))
        return image.astype(np.uint8), depth.astype(np.float32)


class DepthHead(Segmenter):
    """Depth [b, h, w] of the patches: the linear head of segmentation, of one class."""

    fusions = tuple(name for name in Segmenter.fusions if name != "dtop")

    def predict(self, encoded, inputs, *, train, keys):
        logits, out = super().predict(encoded, inputs, train=train, keys=keys)
        return logits[..., 0], out


class DepthPredictor(Predictor):
    """Resizes to the model's size, and draws depth beside each image."""

    def prepare(self, images):
        size = self.model.image_size[::-1]
        return np.stack([np.asarray(read(image).resize(size)) for image in images])

    @classmethod
    def picture(cls, model):
        return "depth.png"

    def explain(self, images, path, truths=None):
        pixels = self.prepare(images)
        depth = np.asarray(self(pixels))
        FigureCanvasAgg(figure := Figure(figsize=(3, 1.5 * len(depth))))
        for row, axes in enumerate(figure.subplots(len(depth), 2, squeeze=False)):
            axes[0].imshow(pixels[row])
            axes[1].imshow(depth[row], vmin=0, vmax=10)
        figure.savefig(path)
        return [[("nearest", float(one.min() / one.max()))] for one in depth]


class Deltas:
    """Evaluator: share of patches within a quarter of the truth, and the mean error in metres."""

    def __init__(self):
        self._sums = np.zeros(3)

    def add(self, outputs):
        self._sums += [outputs["close"], outputs["error"], outputs["mask"].sum()]

    def result(self):
        close, error, count = self._sums.tolist()
        return Result({"delta1": close / count, "mae": error / count, "examples": count})


def example(settings, record, rng=None):
    """(settings, record) -> what batches consist of; the workers of the pipeline run it."""
    image = preprocess.normalize(record["image"], settings["mean"], settings["std"])
    return {"image": image, "label": record["label"]}


def of_patches(label, grid):
    """Mean depth of each patch [b, h, w] of float maps [b, height, width]."""
    rows, columns = (side // count for side, count in zip(label.shape[1:], grid, strict=True))
    return label.reshape(-1, grid[0], rows, grid[1], columns).mean((2, 4))


@dataclasses.dataclass(frozen=True)
class Depth(Task):
    """Mean depth of each patch."""

    name: ClassVar = "depth"
    metric: ClassVar = Metric("delta1", "delta 1")
    fractions: ClassVar = frozenset({"delta1"})
    main_loss: ClassVar = "L1"
    head: ClassVar = DepthHead
    predictor: ClassVar = DepthPredictor
    labels: ClassVar = Scenes.kind
    made_up: ClassVar = "scenes"
    fields: ClassVar = {"preprocess": PREPROCESS}

    def train_transform(self, preprocess):
        return functools.partial(example, preprocess)

    def eval_transform(self, preprocess, source):
        return functools.partial(example, preprocess)

    def filler(self, preprocess, source, *, train=False):
        res = preprocess["res"]
        return {"image": np.zeros((*res, 3), np.float32), "label": np.ones(res, np.float32)}

    def prepare(self, batch, model, key):
        return {"image": batch["image"]}, of_patches(batch["label"], model.grid)

    def criterion(self, logits, places, targets):
        truth = targets.reshape(targets.shape[0], -1)
        truth = truth if places is None else jnp.take_along_axis(truth, places, axis=1)
        return jnp.abs(logits[..., 0] - truth).mean()

    def losses(self, prediction, extra, targets):
        return total(jnp.abs(prediction - targets).mean(), extra)

    def measure(self, apply, batch):
        depth = apply({"image": batch["image"]})
        truth = of_patches(batch["label"], depth.shape[1:])
        close = jnp.maximum(depth / truth, truth / jnp.maximum(depth, 1e-6)) < 1.25
        means = {"close": close, "error": jnp.abs(depth - truth)}
        return {name: value.mean((1, 2)) @ batch["mask"] for name, value in means.items()}

    def evaluator(self, source):
        return Deltas()

    def example_batch(self, model, size):
        image = np.ones((size, *model.image_size, 3), np.float32)
        return {"image": image, "label": image[..., 0], "id": np.arange(size, dtype=np.int32)}

    def card(self, config):
        return [("depth", "of patches, in metres")]


tasks.register(Depth)
READERS["scenes"] = lambda data, split: Scenes(data["num_examples"], tuple(data["image_size"]))
