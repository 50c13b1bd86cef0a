"""Photometric distortion of uint8 images, with the released code's rounding at every step.

Liu et al. 2016 (SSD), in the form of open-mmlab/mmsegmentation 0.x `mmseg/datasets/pipelines/
transforms.py:PhotoMetricDistortion`. Hue, saturation and value are OpenCV's for 8 bits: hue in
steps of two degrees from 0 to 179, the others from 0 to 255 (opencv/opencv
`modules/imgproc/src/color_hsv.simd.hpp`).
"""

from __future__ import annotations

import functools

import numpy as np

BRIGHTNESS = 32.0
CONTRAST = (0.5, 1.5)
SATURATION = (0.5, 1.5)
HUE = 18
_HUES = 180


def distort(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Brightness, contrast, saturation and hue, each changed with probability 0.5.

    Contrast comes before or after the other two, by a coin.

    Args:
      image: uint8 [h, w, 3], RGB.
      rng: of all draws.

    Returns:
      uint8 [h, w, 3].
    """
    if _coin(rng):
        image = _linear(image, 1.0, rng.uniform(-BRIGHTNESS, BRIGHTNESS))
    contrast_first = _coin(rng)
    if contrast_first and _coin(rng):
        image = _linear(image, rng.uniform(*CONTRAST), 0.0)
    if _coin(rng):
        image = scale_saturation(image, rng.uniform(*SATURATION))
    if _coin(rng):
        image = shift_hue(image, int(rng.integers(-HUE, HUE)))
    if not contrast_first and _coin(rng):
        image = _linear(image, rng.uniform(*CONTRAST), 0.0)
    return image


def scale_saturation(image: np.ndarray, factor: float) -> np.ndarray:
    """Multiplies the saturation of a uint8 image [h, w, 3], by way of 8-bit HSV."""
    hue, saturation, value = rgb_to_hsv(image)
    return hsv_to_rgb(hue, _ramp(factor, 0.0).take(saturation), value)


def shift_hue(image: np.ndarray, steps: int) -> np.ndarray:
    """Turns the hue of a uint8 image [h, w, 3] by `steps` of two degrees, by way of 8-bit HSV."""
    hue, saturation, value = rgb_to_hsv(image)
    return hsv_to_rgb(((np.arange(_HUES) + steps) % _HUES).take(hue), saturation, value)


def rgb_to_hsv(image: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hue (0 to 179), saturation and value (0 to 255), int32 [h, w] each, of uint8 [h, w, 3].

    Equal to `cv2.COLOR_RGB2HSV`.
    """
    red, green, blue = (image[..., i].astype(np.int32) for i in range(3))
    value = np.maximum(np.maximum(red, green), blue)
    spread = value - np.minimum(np.minimum(red, green), blue)
    by_value, by_spread = _divisions()
    # Fixed point with 12 bits, rounded.
    saturation = (spread * by_value.take(value) + 2048) >> 12
    hue = np.where(
        value == red,
        green - blue,
        np.where(value == green, blue - red + 2 * spread, red - green + 4 * spread),
    )
    hue = (hue * by_spread.take(spread) + 2048) >> 12
    hue += _HUES * (hue < 0)
    return hue, saturation, value


def hsv_to_rgb(hue: np.ndarray, saturation: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The inverse of `rgb_to_hsv`, rounded: uint8 [h, w, 3]. As `cv2.COLOR_HSV2RGB`."""
    shares = _shares().take(hue * 256 + saturation, 0)
    shares *= value[..., None]
    return np.rint(shares, out=shares).astype(np.uint8)


@functools.cache
def _divisions() -> tuple[np.ndarray, np.ndarray]:
    """OpenCV's tables of 255 / n and 180 / (6 n), int32 [256] with 12 bits after the point."""
    number = np.arange(1, 256)
    tables = (np.rint(top / number).astype(np.int32) for top in (255 * 4096, 180 * 4096 / 6))
    by_value, by_spread = (np.concatenate([np.zeros(1, np.int32), table]) for table in tables)
    return by_value, by_spread


@functools.cache
def _shares() -> np.ndarray:
    """By hue * 256 + saturation: red, green and blue as shares of the value, float32 [n, 3]."""
    sector, place = np.divmod(np.arange(_HUES)[:, None] / (_HUES / 6), 1)
    part = np.arange(256) / 255
    top = np.ones((_HUES, 256))
    low, falling, rising = top - part, 1 - part * place, 1 - part * (1 - place)
    # Around the circle: red, yellow, green, cyan, blue, magenta.
    colours = (
        (top, rising, low),
        (falling, top, low),
        (low, top, rising),
        (low, falling, top),
        (rising, low, top),
        (top, low, falling),
    )
    table = np.stack([np.stack(colour, -1) for colour in colours])
    return table[sector[:, 0].astype(int), np.arange(_HUES)].reshape(-1, 3).astype(np.float32)


def _linear(image: np.ndarray, factor: float, offset: float) -> np.ndarray:
    # Take is twice as fast as indexing.
    return _ramp(factor, offset).take(image)


def _ramp(factor: float, offset: float) -> np.ndarray:
    """uint8 [256]: every value times `factor` plus `offset`, clipped and truncated."""
    ramp = np.arange(256, dtype=np.float32) * np.float32(factor) + np.float32(offset)
    return np.clip(ramp, 0, 255).astype(np.uint8)


def _coin(rng: np.random.Generator) -> bool:
    return rng.random() < 0.5
