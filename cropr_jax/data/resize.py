"""Resizing of uint8 arrays as OpenCV does it, without smoothing when an image shrinks.

The released segmentation recipe resizes with OpenCV (open-mmlab/mmcv `mmcv/image/geometric.py:
imrescale`), and Pillow has no such filter: its bilinear one averages when it shrinks. Any window
of the result can be made alone, so that a crop costs what its own pixels cost.

Sizes are (h, w) in pixels, windows (top, left, h, w) of the resized image.
"""

from __future__ import annotations

import numpy as np

Size = tuple[int, int]
Window = tuple[int, int, int, int]

# OpenCV's weights are multiples of 2**-11 (opencv/opencv `modules/imgproc/src/resize.cpp`).
_ONE = 2048


def scaled(size: Size, factor: float) -> Size:
    """Both sides times `factor`, rounded half up as mmcv does, at least one pixel."""
    return max(int(size[0] * factor + 0.5), 1), max(int(size[1] * factor + 0.5), 1)


def fitted(size: Size, res: Size) -> Size:
    """The largest size of the same aspect ratio inside `res`; one side is exactly that of `res`."""
    height, width = scaled(size, min(res[0] / size[0], res[1] / size[1]))
    return min(height, res[0]), min(width, res[1])


def filling(size: Size, res: Size, most: int) -> Size:
    """The smallest size of the same aspect ratio that `res` fits into, sides at most `most` times.

    One side is exactly that of `res`, or, of an image too elongated for that, the other is `most`
    times that of `res`.
    """
    tall, wide = res[0] / size[0], res[1] / size[1]
    height, width = scaled(size, min(max(tall, wide), most * min(tall, wide)))
    return min(height, most * res[0]), min(width, most * res[1])


def whole(size: Size) -> Window:
    """The window that holds all of an image."""
    return 0, 0, *size


def bilinear(image: np.ndarray, size: Size, window: Window) -> np.ndarray:
    """A window of an image resized to `size`, half-pixel centres, as `cv2.INTER_LINEAR`.

    In OpenCV's fixed-point arithmetic, so equal to it to the last bit.

    Args:
      image: uint8 [h, w, c].
      size: of the whole resized image.
      window: which part of that to make.

    Returns:
      uint8 [window's h, window's w, c].
    """
    top, left, height, width = window
    if size == image.shape[:2]:
        return image[top : top + height, left : left + width]
    row, next_row, upper, lower = _taps(image.shape[0], size[0], top, height)
    column, next_column, before, after = _taps(image.shape[1], size[1], left, width)
    # Only rows that are read.
    first, last = row[0], next_row[-1] + 1
    image = image[first:last]
    wide = image.take(column, 1) * before[:, None]
    wide += image.take(next_column, 1) * after[:, None]
    wide >>= 4
    above = wide[row - first]
    above *= upper[:, None, None]
    above >>= 16
    below = wide[next_row - first]
    below *= lower[:, None, None]
    below >>= 16
    above += below
    above += 2
    above >>= 2
    return above.astype(np.uint8)


def nearest(labels: np.ndarray, size: Size, window: Window) -> np.ndarray:
    """A window of a label map resized to `size`: output i reads floor(i n / m).

    As `cv2.INTER_NEAREST`.

    Args:
      labels: uint8 [h, w].
      size: of the whole resized map.
      window: which part of that to make.

    Returns:
      uint8 [window's h, window's w].
    """
    top, left, height, width = window
    rows = _floors(labels.shape[0], size[0], top, height)
    return labels[rows].take(_floors(labels.shape[1], size[1], left, width), 1)


def _floors(old: int, new: int, start: int, count: int) -> np.ndarray:
    # One over the inverse, as OpenCV has it: another rounding would move a few pixels.
    index = np.floor(np.arange(start, start + count) * (1 / (new / old)))
    return np.minimum(index.astype(np.intp), old - 1)


def _taps(
    old: int, new: int, start: int, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Indices of the two source pixels of outputs `start` on, and their int32 weights."""
    place = (np.arange(start, start + count) + 0.5) * (1 / (new / old)) - 0.5
    place = place.astype(np.float32)
    index = np.floor(place).astype(np.intp)
    share = place - index
    first, second = (np.rint(w * _ONE).astype(np.int32) for w in (1 - share, share))
    return np.clip(index, 0, old - 1), np.clip(index + 1, 0, old - 1), first, second
