"""Position tables and patch kernels for another grid or patch, by the rule of where they came from.

Two rules are in use, and they differ by more than rounding:

| rule | position table | patch kernel |
| --- | --- | --- |
| 'timm' | bicubic, a = -0.5, antialiased | pseudo-inverse of that resize (FlexiViT) |
| 'torch' | bicubic, a = -0.75, no antialias | the same resize, no compensation |

'timm' is what timm does when it loads weights, and with it the released Cropr; the response of a
resampled kernel to a resampled patch stays what it was. 'torch' is `interpolate(mode='bicubic')` as
MAE and EVA call it; kernels lose or gain with the number of pixels.

Sources: timm `layers/pos_embed.py:resample_abs_pos_embed`, `layers/patch_embed.py:
resample_patch_embed`; facebookresearch/mae: util/pos_embed.py; baaivision/EVA:
EVA-02/asuka/utils.py, EVA-01/seg/interpolate_patch_14to16.py.
"""

import math

import jax
import numpy as np
from jaxtyping import Float

from cropr_jax.errors import ConfigError

# By rule: what `jax.image.resize` calls the kernel, and whether it is widened when shrinking.
METHODS = {"timm": ("bicubic", True), "torch": ("bicubic-pytorch", False)}

# Pixels along a side of a patch. The matrix of a resize grows with the fourth power.
MAX_PATCH = 64


def check_rule(rule: str, field: str = "resampling") -> None:
    """Refuses an unknown rule.

    Raises:
      ConfigError: naming the field and the rules.
    """
    if rule not in METHODS:
        expected = " or ".join(map(repr, METHODS))
        raise ConfigError(f"{field}: found {rule!r}, expected {expected}")


def _resize(
    images: Float[np.ndarray, "h w c"], size: tuple[int, int], rule: str
) -> Float[np.ndarray, "h2 w2 c"]:
    method, antialias = METHODS[rule]
    resized = jax.image.resize(images, (*size, images.shape[-1]), method, antialias=antialias)
    return np.asarray(resized)


def resample_positions(
    table: np.ndarray,
    grid: tuple[int, int],
    prefix: int,
    source_grid: tuple[int, int],
    rule: str = "timm",
) -> Float[np.ndarray, "1 t d"]:
    """A position table for another grid.

    Args:
      table: [1, p + m, d] over `source_grid`; the prefix entries are kept as they are.
      grid: (h, w) wanted.
      prefix: p.
      source_grid: (h, w) of the table.
      rule: 'timm' or 'torch'.

    Returns:
      [1, p + h*w, d], float32.
    """
    width = table.shape[-1]
    table = np.asarray(table, np.float32)
    resized = _resize(table[0, prefix:].reshape(*source_grid, width), grid, rule)
    return np.concatenate([table[:, :prefix], resized.reshape(1, -1, width)], axis=1)


def resample_kernel(
    kernel: np.ndarray, patch: tuple[int, int], rule: str = "timm"
) -> Float[np.ndarray, "ph pw c d"]:
    """A patch kernel for another patch.

    With 'timm' it is the kernel w' whose products with resized patches B x come closest to those of
    w with x: w' = pinv(B^T) w, where B is the matrix of the resize.

    Args:
      kernel: [ph, pw, c, d].
      patch: (height, width) in pixels wanted.
      rule: 'timm' or 'torch'.

    Returns:
      float32.

    Raises:
      ConfigError: if the patch is larger than any that a model has.
    """
    *old, channels, width = kernel.shape
    if max(old) > MAX_PATCH:
        raise ConfigError(
            f"weights: patch_embed has patches of {old[0]} x {old[1]} pixels, expected at most "
            f"{MAX_PATCH} along a side"
        )
    pixels = old[0] * old[1]
    flat = np.asarray(kernel, np.float32).reshape(pixels, channels * width)
    if rule == "torch":
        resized = _resize(flat.reshape(*old, -1), patch, rule)
    else:
        units = np.eye(pixels, dtype=np.float32).reshape(*old, pixels)
        matrix = _resize(units, patch, rule).reshape(-1, pixels)
        resized = np.linalg.pinv(matrix.T) @ flat
    return resized.reshape(*patch, channels, width)


def square_grid(entries: int, prefix: int) -> tuple[int, int]:
    """The (h, w) of a position table that was trained on square images.

    Args:
      entries: p + m.
      prefix: p.

    Raises:
      ConfigError: if its patch entries fill no square.
    """
    patches = entries - prefix
    side = math.isqrt(max(patches, 0))
    if side * side != patches or not patches:
        raise ConfigError(
            f"weights: pos_embed has {entries} entries; without {prefix} for the prefix "
            "they fill no square grid; say which they fill: python -m cropr_jax.convert SRC DST "
            "--grid HxW"
        )
    return side, side


def held_prefix(entries: int, prefix: int, grid: tuple[int, int] | None = None) -> int:
    """For how many prefix tokens a position table has entries.

    What the grid leaves, if it is known. Else all of them, unless the rest would fill no square and
    would without registers or without any (timm's `no_embed_class`).

    Args:
      entries: of the table.
      prefix: p.
      grid: (h, w) of the table, or None.
    """
    if grid is not None:
        left = entries - grid[0] * grid[1]
        return left if 0 <= left <= prefix else prefix
    for held in (prefix, min(prefix, 1), 0):
        side = math.isqrt(max(entries - held, 0))
        if side and side * side == entries - held:
            return held
    return prefix


def pad_prefix(
    table: Float[np.ndarray, "1 t d"], prefix: int, held: int
) -> Float[np.ndarray, "1 t2 d"]:
    """A table with entries for all prefix tokens: zeros where it has none.

    Weights whose prefix tokens stand apart from the positions, all of them (big_vision) or all but
    CLS (registers), compute the same with zeros there.

    Args:
      table: [1, q + m, d].
      prefix: p.
      held: q <= p, prefix entries of the table; those of the first tokens.

    Returns:
      [1, p + m, d].
    """
    if held == prefix:
        return table
    zeros = np.zeros((1, prefix - held, table.shape[-1]), table.dtype)
    return np.concatenate([table[:, :held], zeros, table[:, held:]], axis=1)
