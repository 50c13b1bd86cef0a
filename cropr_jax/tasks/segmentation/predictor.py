"""The predictor of segmentation: label maps at the images' own sizes.

    import cropr_jax
    predictor = cropr_jax.load("runs/camvid")
    maps = predictor.segment(["street.jpg", "square.png"])       # uint8 [height, width] each
    logits = predictor(images)                                   # [b, h, w, c], of the patches

Letters: b images, c classes, h and w the patch grid.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from cropr_jax.models import Trunk
from cropr_jax.tasks.predictor import Predictor, read
from cropr_jax.tasks.segmentation import evaluation as segmentation

if TYPE_CHECKING:
    from PIL import Image

# Maps are computed at sizes in steps of so many pixels, so that few are compiled.
STEP = 64


class SegmentationPredictor(Predictor):
    """Finds the class of every pixel with a pruned model."""

    def prepare(self, images: Sequence[Any]) -> np.ndarray:
        """float32 [b, height, width, 3]: each image once, normalised, padded to the model's size.

        Raises:
          ConfigError: without `preprocess` settings, or on a file that cannot be read.
        """
        settings = self.settings() | {"eval_stride": None}
        return self._windows([read(image) for image in images], settings)[0][:, 0]

    def segment(self, images: Sequence[Any], batch_size: int = 1) -> list[np.ndarray]:
        """The class of every pixel of images, as evaluation finds it.

        Args:
          images: files, Pillow images or uint8 arrays [height, width, 3], of any sizes.
          batch_size: of the model's calls; one program is compiled for each.

        Returns:
          uint8 [height, width] for each image.

        Raises:
          ConfigError: without `preprocess` settings, or on a file that cannot be read.
        """
        opened = [read(image) for image in images]
        count, maps = len(opened), []
        for start in range(0, count, batch_size):
            # The last batch is filled with its last image.
            chosen = [opened[min(i, count - 1)] for i in range(start, start + batch_size)]
            sizes = np.array([(image.height, image.width) for image in chosen], np.int32)
            pixels, corner, resized = self._windows(chosen, self.settings())
            needed = (corner < resized[:, None]).all(-1).any(0)
            found = full_size(
                jnp.stack([self(pixels[:, i]) for i in np.flatnonzero(needed)], 1),
                segmentation.Places(*map(jnp.asarray, (corner[:, needed], resized, sizes))),
                padded=self.model.image_size,
                largest=tuple((-(-sizes.max(0) // STEP) * STEP).tolist()),
            )
            maps += [
                labels[:height, :width].astype(np.uint8)
                for labels, (height, width) in zip(np.asarray(found), sizes, strict=True)
            ][: count - start]
        return maps

    @classmethod
    def picture(cls, model: Trunk) -> str:
        """`segmentation.png`, of every model."""
        return "segmentation.png"

    def explain(
        self, images: Sequence[Any], path: str | Path, truths: Sequence[np.ndarray] | None = None
    ) -> list[list[tuple[str, float]]]:
        """`Predictor.explain`, with or without pruned patches; shares are those of the pixels.

        Args:
          images, path: as there.
          truths: maps uint8 [height, width], 255 where nothing is known.
        """
        from cropr_jax.visualize.segmentation import segmentation_figure

        pixels = self.prepare(images)
        _, out = self.predict(pixels)
        maps = None
        if out.get("pruned"):
            mean, std = (np.asarray(self.settings()[name]) for name in ("mean", "std"))
            seen = np.clip(255 * (pixels * std + mean) + 0.5, 0, 255).astype(np.uint8)
            maps = seen, np.asarray(out["pruned_after"])
        found = self.segment(images)
        names = [self.name(label) for label in range(self.model.num_classes)]
        shown = [np.asarray(read(image)) for image in images]
        segmentation_figure(shown, found, truths, maps, self.model.depth, names, path)
        return [self.shares(labels) for labels in found]

    def _windows(
        self, images: Sequence[Image.Image], settings: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`cropr_jax.data.segmentation.Windows` of images, each part stacked."""
        from cropr_jax.data.segmentation import eval_windows

        made = [eval_windows(image, settings) for image in images]
        pixels, corner, resized = (np.stack([np.asarray(w[i]) for w in made]) for i in range(3))
        return pixels, corner, resized.astype(np.int32)

    def shares(self, labels: np.ndarray, k: int = 5) -> list[tuple[str, float]]:
        """The k classes of most pixels in a map as (name, share), greatest first."""
        counts = np.bincount(labels.ravel(), minlength=self.model.num_classes)
        best = np.argsort(-counts, kind="stable")[:k]
        return [
            (self.name(int(label)), float(counts[label] / labels.size))
            for label in best
            if counts[label]
        ]


@functools.partial(jax.jit, static_argnames=("padded", "largest"))
def full_size(
    logits: jax.Array,
    places: segmentation.Places,
    *,
    padded: tuple[int, int],
    largest: tuple[int, int],
) -> jax.Array:
    """`cropr_jax.tasks.segmentation.evaluation.label_maps`, compiled."""
    return segmentation.label_maps(logits, padded, places, largest)
