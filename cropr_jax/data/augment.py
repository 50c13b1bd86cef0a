"""Training augmentation of images with timm's semantics, in NumPy and Pillow.

Every function takes its randomness from an explicit `numpy.random.Generator`. What each draws, in
which ranges, and what it does to the pixels follows timm 1.0.3 (huggingface/pytorch-image-models
`timm/data/transforms.py`, `random_erasing.py`); RandAugment is in `rand_augment.py`.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

CROP_RATIO = (3 / 4, 4 / 3)
ERASE_AREA = (0.02, 1 / 3)
ERASE_ASPECT = (0.3, 1 / 0.3)
_ATTEMPTS = 10


def crop_box(
    size: tuple[int, int], scale: tuple[float, float], rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """A random crop (top, left, height, width) of an image of `size` (h, w), in pixels.

    Area fraction uniform in `scale`, aspect ratio w/h log-uniform in (3/4, 4/3), up to ten
    attempts; then the largest centred box whose ratio is in the range.
    """
    height, width = size
    low, high = math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1])
    for _ in range(_ATTEMPTS):
        area = rng.uniform(*scale) * height * width
        ratio = math.exp(rng.uniform(low, high))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        # An image of a few pixels could get a crop of none.
        if 0 < w <= width and 0 < h <= height:
            top = int(rng.integers(0, height - h, endpoint=True))
            left = int(rng.integers(0, width - w, endpoint=True))
            return top, left, h, w
    h, w = height, width
    if width / height < CROP_RATIO[0]:
        h = min(height, round(width / CROP_RATIO[0]))
    elif width / height > CROP_RATIO[1]:
        w = min(width, round(height * CROP_RATIO[1]))
    return (height - h) // 2, (width - w) // 2, h, w


def random_resized_crop(
    image: Image.Image,
    res: tuple[int, int],
    scale: tuple[float, float],
    resample: int,
    rng: np.random.Generator,
) -> Image.Image:
    """A random crop (`crop_box`), resized to `res` (h, w) with Pillow's antialiased filter."""
    top, left, h, w = crop_box((image.height, image.width), scale, rng)
    # Cropped before resizing, as timm does: Resampling.resize(box=...) would read beyond the box.
    crop = image.crop((left, top, left + w, top + h))
    return crop.resize((res[1], res[0]), resample)


def random_flip(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Mirrors left and right with probability 0.5."""
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image


def erase_box(size: tuple[int, int], rng: np.random.Generator) -> tuple[int, int, int, int] | None:
    """A box (top, left, height, width) to erase from an image of `size` (h, w), or None.

    Area fraction uniform in (0.02, 1/3), aspect ratio h/w log-uniform in (0.3, 1/0.3); both sides
    strictly smaller than the image's; up to ten attempts.
    """
    height, width = size
    low, high = math.log(ERASE_ASPECT[0]), math.log(ERASE_ASPECT[1])
    for _ in range(_ATTEMPTS):
        area = rng.uniform(*ERASE_AREA) * height * width
        aspect = math.exp(rng.uniform(low, high))
        h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if h < height and w < width:
            top = int(rng.integers(0, height - h, endpoint=True))
            left = int(rng.integers(0, width - w, endpoint=True))
            return top, left, h, w
    return None


def random_erasing(image: np.ndarray, probability: float, rng: np.random.Generator) -> np.ndarray:
    """Fills one box with N(0, 1) noise, drawn for every pixel and channel ("pixel" mode).

    Args:
      image: float32 [h, w, c], normalised.
      probability: of erasing at all.

    Returns:
      float32 [h, w, c]; the input itself when nothing is erased.
    """
    if rng.random() >= probability:
        return image
    box = erase_box(image.shape[:2], rng)
    if box is None:
        return image
    top, left, h, w = box
    image = image.copy()
    image[top : top + h, left : left + w] = rng.standard_normal(
        (h, w, image.shape[2]), dtype=np.float32
    )
    return image
