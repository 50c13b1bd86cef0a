"""Made-up data sets, the same in every process, for tests and dry runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cropr_jax.data.records import CLASS, IGNORE, MAP

# A made-up map is this many by this many patches of one class.
_PATCHES = 4


@dataclass(frozen=True)
class Fake:
    """Made-up images that tell their class by brightness.

    Attributes:
      num_examples: how many; example i has class i modulo `num_classes`.
      image_size: (h, w) in pixels.
      num_classes: how many classes.
    """

    num_examples: int
    image_size: tuple[int, int]
    num_classes: int

    kind = CLASS

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(f"class {i}" for i in range(self.num_classes))

    def __len__(self) -> int:
        return self.num_examples

    def __call__(self, index: int) -> tuple[np.ndarray, int]:
        label = index % self.num_classes
        noise = np.random.default_rng(index).integers(0, 128, (*self.image_size, 3))
        return (noise + 127 * label // max(self.num_classes - 1, 1)).astype(np.uint8), label


@dataclass(frozen=True)
class FakeMaps(Fake):
    """Made-up images of several sizes, whose every pixel tells its class by brightness.

    A pixel of value v has class floor(v num_classes / 256), and nothing is ignored but the first
    row. Example i is i modulo 3 pixels less high and i modulo 2 less wide than `image_size`.
    """

    kind = MAP

    def largest(self) -> tuple[int, int]:
        """The size of example 0."""
        return self.image_size

    def __call__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(index)
        height, width = self.image_size[0] - index % 3, self.image_size[1] - index % 2
        patches = rng.integers(0, self.num_classes, (_PATCHES, _PATCHES))
        rows, columns = (np.arange(side) * _PATCHES // side for side in (height, width))
        classes = patches[rows[:, None], columns]
        # The values v of class c, which are those with floor(v num_classes / 256) = c.
        low, high = (-(-256 * bound // self.num_classes) for bound in (classes, classes + 1))
        image = rng.integers(low[..., None], high[..., None], (height, width, 3)).astype(np.uint8)
        label = classes.astype(np.uint8)
        label[0] = IGNORE
        return image, label
