"""Records of segmentation to examples: an image and a map of classes, 255 where none counts.

Training follows open-mmlab/mmsegmentation 0.x `mmseg/datasets/pipelines/transforms.py` with the
settings of benbergner/cropr `segm/data/config/ade20k.py`; evaluation is that code's one-shot
protocol (`segm/utils/model_utils.py`), or the sliding window of mmsegmentation
(`mmseg/models/segmentors/encoder_decoder.py`). Sizes are (h, w) in pixels. The module needs nothing
but NumPy and Pillow, so that the predictor can use it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from cropr_jax.data import photometric, preprocess, resize
from cropr_jax.data.records import IGNORE, Example, Record, Source
from cropr_jax.errors import ConfigError

Size = tuple[int, int]

# Sides of a resized image in sides of the window, at most: mmsegmentation's (2048, 512) for 512.
MOST = 4
# mmsegmentation's RandomCrop looks at this many crops, and takes the one drawn after the last.
_CROP_TRIES = 10


class Windows(NamedTuple):
    """What a model sees of one image in evaluation.

    Attributes:
      pixels: float32 [n, *res, 3], normalised, 0 (the mean colour) beyond the image.
      corner: int32 [n, 2], (top, left) of each window in the resized image; at its size, so
        outside, where there is no window.
      resized: (h, w) of the image that the windows were cut from.
    """

    pixels: np.ndarray
    corner: np.ndarray
    resized: Size


def eval_transform(settings: Mapping[str, Any], source: Source) -> Callable[[Record], Example]:
    """Record -> example of evaluation: the windows of the image, its annotation in full.

    Returns:
      A function of a record to {'image' float32 [n, *res, 3], 'corner' int32 [n, 2], 'resized'
      int32 [2]: see `Windows`; 'label' uint8 [*largest of the source], 'size' int32 [2], the part
      of it that is no padding}.

    Raises:
      ConfigError: a field of `config.preprocess` that cannot be read.
    """
    return functools.partial(_eval, _checked(settings), _largest(source))


def filler(settings: Mapping[str, Any], source: Source, *, train: bool) -> Example:
    """An example that fills a batch: image 0, nothing to be counted."""
    if train:
        res = _checked(settings)["res"]
        return {"image": np.zeros((*res, 3), np.float32), "label": np.full(res, IGNORE, np.uint8)}
    one = np.ones(2, np.int32)
    count = most_windows(_checked(settings))
    corner = np.ones((count, 2), np.int32)
    corner[0] = 0
    return {
        "image": np.zeros((count, *settings["res"], 3), np.float32),
        "corner": corner,
        "resized": one,
        "label": np.full(_largest(source), IGNORE, np.uint8),
        "size": one,
    }


def _largest(source: Source) -> Size:
    reader: Any = source.reader  # a `MapReader`: the task has checked that
    return reader.largest()


def _eval(settings: Mapping[str, Any], largest: Size, record: Record) -> Example:
    windows = eval_windows(record["image"], settings)
    label = record["label"]
    return {
        "image": windows.pixels,
        "corner": windows.corner,
        "resized": np.array(windows.resized, np.int32),
        "label": pad(label, largest, IGNORE),
        "size": np.array(label.shape, np.int32),
    }


def eval_windows(image: bytes | np.ndarray | Image.Image, settings: Mapping[str, Any]) -> Windows:
    """What the model sees of an image in evaluation.

    One shot: the image as large as fits into `res`. Sliding window: the image just large enough to
    fill `res`, but no side above `MOST` times that of `res`; a window every `eval_stride` pixels,
    the last one moved back to the image's end.

    Args:
      image: as `preprocess.decode` takes it.
      settings: `config.preprocess`: `res`, `mean`, `std`, also as lists, read from JSON;
        `eval_stride` (h, w) in pixels, None or left out for one shot.

    Raises:
      ConfigError: a field of `config.preprocess` that cannot be read.
    """
    settings = _checked(settings)
    res, stride = settings["res"], settings["eval_stride"]
    pixels = np.asarray(preprocess.decode(image))
    size = pixels.shape[:2]
    resized = resize.fitted(size, res) if stride is None else resize.filling(size, res, MOST)
    pixels = resize.bilinear(pixels, resized, resize.whole(resized))
    pixels = preprocess.normalize(pixels, settings["mean"], settings["std"])
    corners = [(0, 0)] if stride is None else window_corners(resized, res, stride)
    count = most_windows(settings)
    windows = np.zeros((count, *res, 3), np.float32)
    for window, (top, left) in zip(windows, corners, strict=False):
        cut = pixels[top : top + res[0], left : left + res[1]]
        window[: cut.shape[0], : cut.shape[1]] = cut
    corner = np.array(corners + [resized] * (count - len(corners)), np.int32)
    return Windows(windows, corner, resized)


def window_corners(size: Size, res: Size, stride: Size) -> list[Size]:
    """(top, left) of every window of `res` on an image of `size`, row by row."""

    def starts(axis: int) -> list[int]:
        count = -(-max(size[axis] - res[axis], 0) // stride[axis]) + 1
        last = max(size[axis] - res[axis], 0)
        return [min(i * stride[axis], last) for i in range(count)]

    return [(top, left) for top in starts(0) for left in starts(1)]


def most_windows(settings: Mapping[str, Any]) -> int:
    """The largest number of windows of an image of any aspect ratio; only one side is slid along.

    Args:
      settings: `res` and `eval_stride` as for `eval_windows`.
    """
    res, stride = settings["res"], settings["eval_stride"]
    if stride is None:
        return 1
    return max(
        len(window_corners((MOST * res[0], res[1]), res, stride)),
        len(window_corners((res[0], MOST * res[1]), res, stride)),
    )


def train_transform(
    settings: Mapping[str, Any],
) -> Callable[[Record, np.random.Generator], Example]:
    """(record, rng) -> {'image' float32 [*res, 3], 'label' uint8 [*res]}.

    Resize by a random ratio, crop, flip, photometric distortion, normalisation, padding.

    Args:
      settings: `config.preprocess`: `res`, `mean`, `std`, and in `train`: `resize_base` (long,
        short), the box that the image is fitted into at ratio 1, (512, 512) in the released code,
        (2048, 512) in Segmenter's and mmsegmentation's; `ratio_range`, of the factor on that box;
        `cat_max_ratio`, the share of a crop that its commonest class must stay below, 1 for any;
        `flip`; `photometric`.

    Raises:
      ConfigError: a field that cannot be read, before any image is.
    """
    return functools.partial(_train, _checked(settings), _checked_train(settings["train"]))


def _train(
    settings: Mapping[str, Any],
    train: Mapping[str, Any],
    record: Record,
    rng: np.random.Generator,
) -> Example:
    pixels, label = np.asarray(preprocess.decode(record["image"])), record["label"]
    size = random_size(label.shape, train["resize_base"], train["ratio_range"], rng)
    # The crop is chosen on the label, and only that part of the image is resized.
    window = random_crop(label, size, settings["res"], train["cat_max_ratio"], rng)
    pixels = resize.bilinear(pixels, size, window)
    label = resize.nearest(label, size, window)
    if train["flip"] and rng.random() < 0.5:
        pixels, label = pixels[:, ::-1], label[:, ::-1]
    if train["photometric"]:
        pixels = photometric.distort(pixels, rng)
    pixels = preprocess.normalize(pixels, settings["mean"], settings["std"])
    return {
        "image": pad(pixels, settings["res"], 0),
        "label": pad(label, settings["res"], IGNORE),
    }


def random_size(
    size: Size, base: tuple[int, int], ratio_range: tuple[float, float], rng: np.random.Generator
) -> Size:
    """The size that an image of `size` is resized to: fitted into `base` times a random ratio.

    Args:
      size: of the image.
      base: (long, short) side of the box at ratio 1; the image may lie in it or stand.
      ratio_range: of the ratio, drawn uniformly.
      rng: of the draw.
    """
    ratio = rng.uniform(*ratio_range)
    long, short = int(max(base) * ratio), int(min(base) * ratio)
    return resize.scaled(size, min(long / max(size), short / min(size)))


def random_crop(
    label: np.ndarray, size: Size, crop: Size, cat_max_ratio: float, rng: np.random.Generator
) -> resize.Window:
    """A window of at most `crop` in a map resized to `size`, of more than one class.

    Drawn anew, ten times at most, until it shows two classes and the commonest covers less than
    `cat_max_ratio` of the pixels that count. At 1 the first is taken.

    Args:
      label: uint8 [h, w], before resizing.
      size: after it.
      crop: of the window; where `size` is smaller the window is.
      cat_max_ratio: see above.
      rng: of the draws.

    Returns:
      (top, left, h, w) in the resized map.
    """
    height, width = min(size[0], crop[0]), min(size[1], crop[1])

    def draw() -> resize.Window:
        top = int(rng.integers(0, size[0] - height, endpoint=True))
        return top, int(rng.integers(0, size[1] - width, endpoint=True)), height, width

    window = draw()
    # Where the window is the whole map another draw is the same one.
    if cat_max_ratio == 1 or (height, width) == size:
        return window
    for _ in range(_CROP_TRIES):
        counts = np.bincount(resize.nearest(label, size, window).ravel(), minlength=IGNORE + 1)
        counts = counts[:IGNORE]
        if np.count_nonzero(counts) > 1 and counts.max() / counts.sum() < cat_max_ratio:
            break
        window = draw()
    return window


def pad(array: np.ndarray, size: Size, value: int) -> np.ndarray:
    """Fills an array [h, w, ...] to `size` with `value`, right and below."""
    height, width = array.shape[:2]
    padded = np.empty((*size, *array.shape[2:]), array.dtype)
    padded[:height, :width] = array
    padded[height:] = value
    padded[:height, width:] = value
    return padded


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: preprocess.numbers(settings, name, length)
        for name, length in (("res", 2), ("mean", 3), ("std", 3))
    }
    fields["eval_stride"] = settings.get("eval_stride")
    if fields["eval_stride"] is not None:
        fields["eval_stride"] = preprocess.numbers(settings, "eval_stride", 2)
        for step, side in zip(fields["eval_stride"], fields["res"], strict=True):
            if not (isinstance(step, int) and 0 < step <= side):
                raise ConfigError(
                    f"config.preprocess.eval_stride is {fields['eval_stride']}, expected (h, w) in "
                    f"pixels, no larger than res {fields['res']}; leave it out for one shot."
                )
    return fields


def _checked_train(train: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of training, where they can be used; errors name the field."""
    base = preprocess.numbers(train, "train.resize_base", 2)
    if min(base) < 1:
        raise ConfigError(
            f"config.preprocess.train.resize_base is {base}, expected (long, short) in pixels."
        )
    low, high = preprocess.numbers(train, "train.ratio_range", 2)
    if not 0 < low <= high:
        raise ConfigError(
            f"config.preprocess.train.ratio_range is {(low, high)}, expected two positive numbers, "
            "the smaller one first."
        )
    ratio = train["cat_max_ratio"]
    if not (isinstance(ratio, int | float) and 0 < ratio <= 1):
        raise ConfigError(
            f"config.preprocess.train.cat_max_ratio is {ratio!r}, expected a number in (0, 1]; 1 "
            "takes any crop."
        )
    return {
        **train,
        "resize_base": base,
        "ratio_range": (float(low), float(high)),
        "cat_max_ratio": float(ratio),
    }
