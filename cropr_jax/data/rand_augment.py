"""RandAugment with timm's op set "inc1": operations whose severity grows with the magnitude.

Cubuk et al. 2020, as in timm 1.0.3 (huggingface/pytorch-image-models `timm/data/auto_augment.py`,
`rand_augment_transform`). Geometric operations are bicubic and fill with the mean colour.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from cropr_jax.errors import ConfigError

MAX_MAGNITUDE = 10.0
Fill = tuple[int, int, int]


@dataclass(frozen=True)
class Policy:
    """A parsed RandAugment string.

    Attributes:
      magnitude: mean magnitude, 0 to 10.
      magnitude_std: standard deviation of the magnitude, drawn anew for every operation.
      layers: operations drawn per image, with replacement.
      probability: of applying a drawn operation.
    """

    magnitude: float
    magnitude_std: float = 0.0
    layers: int = 2
    probability: float = 0.5


def parse_policy(text: str) -> Policy:
    """Reads `rand-m9-mstd0.5-inc1`; also `n<layers>` and `p<probability>`.

    Raises:
      ConfigError: something else, or without `inc1` (the other op set is not implemented).
    """
    kind, *parts = text.split("-")
    fields: dict[str, float] = {}
    for part in parts:
        match = re.fullmatch(r"(mstd|inc|m|n|p)(\d+(?:\.\d+)?)", part)
        if match is None:
            raise _bad_policy(text, f"cannot read {part!r}")
        fields[match[1]] = float(match[2])
    if kind != "rand" or "m" not in fields or fields.get("inc") != 1:
        raise _bad_policy(text, "needs rand, m and inc1")
    if fields["m"] > MAX_MAGNITUDE or fields.get("p", 0.5) > 1:
        raise _bad_policy(text, "m is 0 to 10, p is 0 to 1")
    return Policy(
        magnitude=fields["m"],
        magnitude_std=fields.get("mstd", 0.0),
        layers=int(fields.get("n", 2)),
        probability=fields.get("p", 0.5),
    )


def _bad_policy(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"config.preprocess.train.rand_augment {text!r}: {why}; expected 'rand-m9-mstd0.5-inc1', "
        "optionally with -n2 (operations per image) and -p0.5 (probability of each)."
    )


def rand_augment(
    image: Image.Image, policy: Policy, fill: Fill, rng: np.random.Generator
) -> Image.Image:
    """Applies the policy to an RGB image.

    Args:
      image: RGB, any size.
      policy: see `Policy`.
      fill: colour for what geometric operations bring in from outside, 0 to 255.
      rng: all randomness.
    """
    for index in rng.integers(0, len(OPS), policy.layers):
        if rng.random() >= policy.probability:
            continue
        magnitude = float(np.clip(rng.normal(policy.magnitude, policy.magnitude_std), 0, 10))
        sign = -1.0 if rng.random() < 0.5 else 1.0
        name = OP_NAMES[index]
        image = OPS[name](image, ARGUMENTS[name](magnitude, sign), fill)
    return image


# What the magnitude m in [0, 10] and the sign mean to each operation.


def _none(m: float, sign: float) -> None:
    return None


def _enhance(m: float, sign: float) -> float:
    return max(0.1, 1.0 + sign * m / 10 * 0.9)


ARGUMENTS: dict[str, Callable[[float, float], float | None]] = {
    "AutoContrast": _none,
    "Equalize": _none,
    "Invert": _none,
    "Rotate": lambda m, sign: sign * m / 10 * 30,  # degrees, counter-clockwise
    "PosterizeIncreasing": lambda m, sign: 4 - int(m / 10 * 4),  # bits kept
    "SolarizeIncreasing": lambda m, sign: 256 - min(256, int(m / 10 * 256)),  # threshold
    "SolarizeAdd": lambda m, sign: min(128, int(m / 10 * 110)),  # added below 128
    "ColorIncreasing": _enhance,  # blend factor, 1 = unchanged
    "ContrastIncreasing": _enhance,
    "BrightnessIncreasing": _enhance,
    "SharpnessIncreasing": _enhance,
    "ShearX": lambda m, sign: sign * m / 10 * 0.3,
    "ShearY": lambda m, sign: sign * m / 10 * 0.3,
    "TranslateXRel": lambda m, sign: sign * m / 10 * 0.45,  # fraction of the side
    "TranslateYRel": lambda m, sign: sign * m / 10 * 0.45,
}


def posterize(image: Image.Image, bits: int) -> Image.Image:
    """Keeps the `bits` highest bits of every value; 0 bits give a black image.

    Not Pillow's, which from version 13 refuses 0 bits (2.3 % of the draws at m=9, std 0.5).
    """
    mask = 0xFF & ~(2 ** (8 - bits) - 1)
    return image.point([value & mask for value in range(256)] * 3)


def solarize_add(image: Image.Image, add: int) -> Image.Image:
    """Adds `add` to values below 128, capped at 255."""
    return image.point([min(255, v + add) if v < 128 else v for v in range(256)] * 3)


def affine(
    image: Image.Image, matrix: tuple[float, float, float, float, float, float], fill: Fill
) -> Image.Image:
    """Bicubic map from output to input: x' = a x + b y + c, y' = d x + e y + f (pixels)."""
    return image.transform(
        image.size,
        Image.Transform.AFFINE,
        matrix,
        resample=Image.Resampling.BICUBIC,
        fillcolor=fill,
    )


def _rotate(image: Image.Image, degrees: float, fill: Fill) -> Image.Image:
    return image.rotate(degrees, resample=Image.Resampling.BICUBIC, fillcolor=fill)


OPS: dict[str, Callable[..., Image.Image]] = {
    "AutoContrast": lambda image, arg, fill: ImageOps.autocontrast(image),
    "Equalize": lambda image, arg, fill: ImageOps.equalize(image),
    "Invert": lambda image, arg, fill: ImageOps.invert(image),
    "Rotate": _rotate,
    "PosterizeIncreasing": lambda image, bits, fill: posterize(image, bits),
    "SolarizeIncreasing": lambda image, limit, fill: ImageOps.solarize(image, limit),
    "SolarizeAdd": lambda image, add, fill: solarize_add(image, add),
    "ColorIncreasing": lambda image, by, fill: ImageEnhance.Color(image).enhance(by),
    "ContrastIncreasing": lambda image, by, fill: ImageEnhance.Contrast(image).enhance(by),
    "BrightnessIncreasing": lambda image, by, fill: ImageEnhance.Brightness(image).enhance(by),
    "SharpnessIncreasing": lambda image, by, fill: ImageEnhance.Sharpness(image).enhance(by),
    "ShearX": lambda image, by, fill: affine(image, (1.0, by, 0.0, 0.0, 1.0, 0.0), fill),
    "ShearY": lambda image, by, fill: affine(image, (1.0, 0.0, 0.0, by, 1.0, 0.0), fill),
    "TranslateXRel": lambda image, by, fill: affine(
        image, (1.0, 0.0, by * image.width, 0.0, 1.0, 0.0), fill
    ),
    "TranslateYRel": lambda image, by, fill: affine(
        image, (1.0, 0.0, 0.0, 0.0, 1.0, by * image.height), fill
    ),
}
OP_NAMES = tuple(OPS)
