"""The predictor of segmentation: label maps at the images' own sizes.

    import cropr_jax
    predictor = cropr_jax.load("runs/camvid")
    maps = predictor.segment(["street.jpg", "square.png"])       # uint8 [height, width] each
    logits = predictor(images)                                   # [b, h, w, c], of the patches

Letters: b images, c classes, h and w the patch grid.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from cropr_jax.inference import Predictor, read
from cropr_jax.tasks import segmentation

# Maps are computed at sizes in steps of so many pixels, so that few are compiled.
STEP = 64


class SegmentationPredictor(Predictor):
    """Finds the class of every pixel with a pruned model."""

    def prepare(self, images: Sequence[Any]) -> np.ndarray:
        """float32 [b, height, width, 3], normalised and padded to the model's size.

        Raises:
          ConfigError: see `fit`.
        """
        return self.fit(images)[0]

    def fit(self, images: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Images as large as the model takes them, padded right and below.

        Args:
          images: files, Pillow images or uint8 arrays [height, width, 3], of any sizes.

        Returns:
          float32 [b, height, width, 3]; int32 [b, 2], the size (height, width) of the part of each
          that is no padding; int32 [b, 2], the size of each image.

        Raises:
          ConfigError: without `preprocess` settings, or on a file that cannot be read.
        """
        from cropr_jax.data.segmentation import eval_image

        settings = self.settings()
        opened = [read(image) for image in images]
        made = [eval_image(image, settings) for image in opened]
        sizes = [(image.height, image.width) for image in opened]
        valid = np.array([part for _, part in made], np.int32)
        return np.stack([pixels for pixels, _ in made]), valid, np.array(sizes, np.int32)

    def segment(self, images: Sequence[Any], batch_size: int = 1) -> list[np.ndarray]:
        """The class of every pixel of images, as evaluation finds it.

        Args:
          images: as for `fit`.
          batch_size: of the model's calls; one program is compiled for each.

        Returns:
          uint8 [height, width] for each image.

        Raises:
          ConfigError: see `fit`.
        """
        pixels, valid, sizes = self.fit(images)
        count, maps = len(pixels), []
        for start in range(0, count, batch_size):
            # The last batch is filled with its last image.
            chosen = np.minimum(np.arange(start, start + batch_size), count - 1)
            largest = tuple((-(-sizes[chosen].max(0) // STEP) * STEP).tolist())
            found = full_size(
                self(pixels[chosen]),
                valid[chosen],
                sizes[chosen],
                padded=self.model.image_size,
                largest=largest,
            )
            real = chosen[: count - start]
            maps += [
                labels[: sizes[i, 0], : sizes[i, 1]].astype(np.uint8)
                for i, labels in zip(real, np.asarray(found), strict=False)
            ]
        return maps

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
    valid: jax.Array,
    size: jax.Array,
    *,
    padded: tuple[int, int],
    largest: tuple[int, int],
) -> jax.Array:
    """`cropr_jax.tasks.segmentation.label_maps`, compiled."""
    return segmentation.label_maps(logits, padded, valid, size, largest)
