"""From records to normalised float images: decoding, evaluation and training transforms.

Sizes are (h, w) in pixels, images RGB; `mean` and `std` refer to values scaled to 0 .. 1. The
module needs nothing but NumPy and Pillow, so that the predictor can use it.

Sources: benbergner/cropr `cls/utils.py:build_transform`, timm 1.0.3 `transforms_factory.py`,
pytorch/vision `transforms/functional.py:resize, center_crop`.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from cropr_jax.data import augment, rand_augment
from cropr_jax.data.annotations import UPRIGHT, orientation
from cropr_jax.data.records import FILTERS, Record
from cropr_jax.errors import ConfigError
from cropr_jax.host.messages import check_choice


def decode(image: bytes | np.ndarray | Image.Image) -> Image.Image:
    """An RGB Pillow image from encoded bytes, or uint8 or uint16 [h, w], [h, w, 1] or [h, w, 3].

    It stands as viewers show it: the orientation that EXIF tells is applied. Grey images are
    replicated to three channels, 16 bits are scaled to 8 by their whole range (Pillow would cut
    them off at 255); other modes (CMYK, palette) are converted.

    Raises:
      ValueError: an array of another type or shape, bytes that Pillow cannot read, or pixels of 32
        bits, whose range nothing tells.
    """
    if isinstance(image, bytes | bytearray | memoryview):
        image = Image.open(io.BytesIO(image))
    elif isinstance(image, np.ndarray):
        shaped = image.ndim in (2, 3) and image.shape[2:] in ((), (1,), (3,))
        if image.dtype not in (np.uint8, np.uint16) or not shaped:
            raise ValueError(
                f"image is {image.dtype} {list(image.shape)}, expected uint8 or uint16 [h, w, 3], "
                "[h, w, 1] or [h, w]"
            )
        pixels = image[..., 0] if image.shape[2:] == (1,) else image
        image = Image.fromarray(_eight_bits(pixels) if image.dtype == np.uint16 else pixels)
    if orientation(image) != UPRIGHT:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        image = Image.fromarray(_eight_bits(np.asarray(image)))
    if image.mode in ("I", "F"):
        raise ValueError(
            f"image has pixels of 32 bits (mode {image.mode}), whose range nothing tells; store it "
            "with 8 or 16 bits"
        )
    return image if image.mode == "RGB" else image.convert("RGB")


def _eight_bits(pixels: np.ndarray) -> np.ndarray:
    """0 to 65535 as 0 to 255, rounded."""
    return np.rint(pixels / 257.0).astype(np.uint8)


def normalize(
    image: Image.Image | np.ndarray, mean: Sequence[float | int], std: Sequence[float | int]
) -> np.ndarray:
    """(image / 255 - mean) / std, float32 [h, w, 3], of an RGB image or uint8 [h, w, 3]."""
    pixels = np.asarray(image)
    height, width = pixels.shape[:2]
    # Whole rows at once and in place: four times as fast as rows of three channels.
    pixels = pixels.reshape(height, 3 * width).astype(np.float32)
    pixels /= np.float32(255)
    pixels -= np.tile(np.asarray(mean, np.float32), width)
    pixels /= np.tile(np.asarray(std, np.float32), width)
    return pixels.reshape(height, width, 3)


def resize_shorter_side(image: Image.Image, size: tuple[int, int], resample: int) -> Image.Image:
    """Resizes, keeping the aspect ratio, until the image just covers `size` (h, w).

    The side that decides becomes exactly that of `size`; the other is truncated to an integer, as
    torchvision does. For a square `size` this is its "resize the shorter side".
    """
    height, width = size
    if width * image.height >= height * image.width:
        new = (width, max(height, int(width * image.height / image.width)))
    else:
        new = (max(width, int(height * image.width / image.height)), height)
    return image if new == image.size else image.resize(new, resample)


def center_crop(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The central `size` (h, w), offset rounded half to even, as torchvision does.

    Raises:
      ValueError: the image is smaller than `size`.
    """
    height, width = size
    if image.height < height or image.width < width:
        raise ValueError(
            f"image is {image.height}x{image.width}, smaller than the crop {height}x{width}; "
            "set preprocess.crop_ratio to a number, so that it is resized first"
        )
    top, left = round((image.height - height) / 2), round((image.width - width) / 2)
    return image.crop((left, top, left + width, top + height))


# A photo's sides differ less.
_LONGEST = 16


def _without_ends(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """A sliver without its ends, which a central crop cannot show and resizing would blow up.

    What is left is `_LONGEST` times as long as `size` shows, so that nothing of an end comes near.
    """
    height, width = size
    longest = (
        max(_LONGEST * image.height * width // height, _LONGEST),
        max(_LONGEST * image.width * height // width, _LONGEST),
    )
    # As much on both sides: the middle stays where it is.
    left, top = (max(0, (side - most) // 2) for side, most in zip(image.size, longest, strict=True))
    if not left and not top:
        return image
    return image.crop((left, top, image.width - left, image.height - top))


def resample_filter(name: str) -> int:
    """Pillow's filter of that name.

    Raises:
      ConfigError: not bicubic, bilinear, lanczos or nearest.
    """
    check_choice("preprocess.interpolation", name, FILTERS)
    return {f.name.lower(): f for f in Image.Resampling}[name]


def eval_image(image: Image.Image, preprocess: Mapping[str, Any]) -> Image.Image:
    """Resizes to res / crop_ratio and crops the centre; `crop_ratio='none'` only crops.

    The resized side is truncated to an integer. With ratio 0.875 at 224 it is 256; the released
    recipes use 1.0 above 224.
    """
    res = tuple(preprocess["res"])
    ratio = preprocess["crop_ratio"]
    if ratio != "none":
        size = (int(res[0] / ratio), int(res[1] / ratio))
        image = _without_ends(image, size)
        image = resize_shorter_side(image, size, resample_filter(preprocess["interpolation"]))
    return center_crop(image, res)


def eval_transform(preprocess: Mapping[str, Any]) -> Callable[[Record], np.ndarray]:
    """The evaluation transform: record -> float32 [h, w, 3].

    Args:
      preprocess: `config.preprocess`: `res` (h, w), `mean`, `std`, `interpolation`, `crop_ratio`.
    """
    return functools.partial(_eval, _checked(preprocess))


def _eval(preprocess: Mapping[str, Any], record: Record) -> np.ndarray:
    image = eval_image(decode(record["image"]), preprocess)
    return normalize(image, preprocess["mean"], preprocess["std"])


def train_transform(
    preprocess: Mapping[str, Any],
) -> Callable[[Record, np.random.Generator], np.ndarray]:
    """The training transform: (record, rng) -> float32 [h, w, 3].

    Random resized crop (with `train.crop_scale` None: the evaluation's resize and crop), flip,
    RandAugment, normalisation, random erasing, in timm's order.

    Args:
      preprocess: `config.preprocess`; `train` has `crop_scale`, `flip`, `rand_augment` ('' = off),
        `erase` (probability).

    Raises:
      ConfigError: a field that cannot be read, before any image is.
    """
    train = dict(preprocess["train"])
    policy = rand_augment.parse_policy(train["rand_augment"]) if train["rand_augment"] else None
    return functools.partial(_train, _checked(preprocess), train, policy)


def _train(
    preprocess: Mapping[str, Any],
    train: Mapping[str, Any],
    policy: rand_augment.Policy | None,
    record: Record,
    rng: np.random.Generator,
) -> np.ndarray:
    image = decode(record["image"])
    if train["crop_scale"] is None:
        image = eval_image(image, preprocess)
    else:
        resample = resample_filter(preprocess["interpolation"])
        scale = tuple(train["crop_scale"])
        image = augment.random_resized_crop(image, preprocess["res"], scale, resample, rng)
    if train["flip"]:
        image = augment.random_flip(image, rng)
    if policy is not None:
        # timm fills with the rounded mean colour: (124, 116, 104) for ImageNet's.
        red, green, blue = (round(255 * value) for value in preprocess["mean"])
        image = rand_augment.rand_augment(image, policy, (red, green, blue), rng)
    pixels = normalize(image, preprocess["mean"], preprocess["std"])
    return augment.random_erasing(pixels, train["erase"], rng) if train["erase"] else pixels


def numbers(preprocess: Mapping[str, Any], name: str, length: int) -> tuple:
    """The field `name` of `config.preprocess` (after a dot, of its section) as a tuple.

    Raises:
      ConfigError: no tuple or list of that many numbers, naming the field.
    """
    value = preprocess[name.rpartition(".")[2]]
    listed = isinstance(value, tuple | list) and len(value) == length
    if not listed or not all(isinstance(number, int | float) for number in value):
        raise ConfigError(
            f"config.preprocess.{name} is {value!r}, expected {length} numbers in a tuple."
        )
    return tuple(value)


def _checked(preprocess: Mapping[str, Any]) -> dict[str, Any]:
    """What both transforms use, as a plain dictionary; errors name the field."""
    fields: dict[str, Any] = {key: preprocess[key] for key in ("interpolation", "crop_ratio")}
    for name, length in (("res", 2), ("mean", 3), ("std", 3)):
        fields[name] = numbers(preprocess, name, length)
    ratio = fields["crop_ratio"]
    if ratio != "none" and not (isinstance(ratio, int | float) and 0 < ratio <= 1):
        raise ConfigError(
            f"config.preprocess.crop_ratio is {ratio!r}, expected a number in (0, 1] or 'none'."
        )
    resample_filter(fields["interpolation"])
    return fields
