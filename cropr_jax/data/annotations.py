"""Masks as they lie on disk, and the one place where their ids become labels.

A mask is a PNG, grey or indexed, whose stored values are ids of classes. Labels are 0 to n - 1 in
the order of the ids, and `IGNORE` where no class counts; nothing else in the project sees ids.
"""

from __future__ import annotations

import functools
import io
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from cropr_jax.data.records import IGNORE
from cropr_jax.errors import ConfigError

_UNKNOWN = 254


@dataclass(frozen=True)
class Legend:
    """What the ids of a data set's masks mean.

    Attributes:
      class_names: of the classes that count, by label.
      ids: of the same classes, ascending.
      ignore: the id of pixels that do not count.
      by_default: whether nobody said so, and it is `IGNORE` for want of a word.
    """

    class_names: tuple[str, ...]
    ids: tuple[int, ...]
    ignore: int
    by_default: bool = False

    @functools.cached_property
    def _table(self) -> np.ndarray:
        table = np.full(256, _UNKNOWN, np.uint8)
        table[list(self.ids)] = np.arange(len(self.ids))
        table[self.ignore] = IGNORE
        return table

    def labels(self, mask: np.ndarray, where: str) -> np.ndarray:
        """Ids to labels, once: what was done before has ids that mean nothing, and is refused.

        For ADE20k this takes 0 to 255 and k to k - 1 (benbergner/cropr `segm/data/base.py`,
        `reduce_zero_label`). Done twice it would go unnoticed but for the 255.

        Args:
          mask: uint8 [h, w] of ids.
          where: file, or file and record, for the message.

        Returns:
          uint8 [h, w] of labels.

        Raises:
          ConfigError: an id that is not in the legend.
        """
        labels = self._table.take(mask)
        if (labels == _UNKNOWN).any():
            found = np.unique(mask[labels == _UNKNOWN]).tolist()
            shifted = " Were its ids changed to labels before?" if found == [IGNORE] else ""
            raise ConfigError(
                f"{where}: id {', '.join(map(str, found[:5]))} in the mask, expected "
                f"{self.ids[0]} to {self.ids[-1]} ({len(self.ids)} classes) or {self.ignore} "
                f"(ignored).{shifted} Mend the mask, the list of classes or config.data.ignore."
            )
        return labels


def make_legend(meta: Any, data: Mapping[str, Any], where: str) -> Legend:
    """The legend that a description of classes and a config's `data` give together.

    Args:
      meta: a list of names, by id; or `{"classes": [...], "ignore_id": 255}` with a list of names
        or of `{"id", "name"}`, and optionally `num_classes`, their number. A class whose id is the
        ignored one is not counted.
      data: `config.data`: `ignore`, an id that goes before the description's;
        `zero_is_ignored`, whether 0 is ignored and names without ids begin at 1; `num_classes`,
        how many classes count, for a check.
      where: file of the description, for messages.

    Raises:
      ConfigError: something else, ids twice or beyond 0 to 255, another number of classes than
        is said.
    """
    from_zero = not data.get("zero_is_ignored")
    described: Mapping[str, Any] = meta if isinstance(meta, Mapping) else {"classes": meta}
    entries = described.get("classes")
    if not isinstance(entries, list) or not entries:
        raise _bad_classes(where)
    if all(isinstance(entry, str) for entry in entries):
        classes = list(enumerate(entries, 0 if from_zero else 1))
    elif all(isinstance(e, Mapping) and {"id", "name"} <= e.keys() for e in entries):
        classes = [(entry["id"], entry["name"]) for entry in entries]
    else:
        raise _bad_classes(where)
    said = described.get("num_classes", len(classes))
    if said != len(classes):
        raise ConfigError(
            f"{where}: num_classes is {said}, but its list has {len(classes)} classes. Mend it."
        )
    ids = [number for number, _ in classes]
    if len(set(ids)) < len(ids) or not all(isinstance(i, int) and 0 <= i <= 255 for i in ids):
        raise ConfigError(f"{where}: ids are {ids}, expected each once, from 0 to 255.")
    ignore, by_default = _ignored(data, described)
    _check_ignore(ignore, by_default, from_zero, ids, described, where)
    classes = sorted((number, name) for number, name in classes if number != ignore)
    expected = data.get("num_classes") or len(classes)
    if not classes or expected != len(classes):
        raise ConfigError(
            f"{where}: {len(classes)} classes count (id {ignore} is ignored), but "
            f"config.data.num_classes is {expected}. Make the list and the config agree."
        )
    if len(classes) > _UNKNOWN:
        raise ConfigError(f"{where}: {len(classes)} classes, expected {_UNKNOWN} at most.")
    return Legend(
        class_names=tuple(name for _, name in classes),
        ids=tuple(number for number, _ in classes),
        ignore=ignore,
        by_default=by_default,
    )


def _ignored(data: Mapping[str, Any], described: Mapping[str, Any]) -> tuple[Any, bool]:
    """The id that does not count, and whether it is `IGNORE` since nothing says so."""
    if data.get("ignore") is not None:
        return data["ignore"], False
    if data.get("zero_is_ignored"):
        return 0, False
    said = described.get("ignore_id")
    return (IGNORE, True) if said is None else (said, False)


def _check_ignore(
    ignore: Any,
    by_default: bool,
    from_zero: bool,
    ids: list[int],
    described: Mapping[str, Any],
    where: str,
) -> None:
    if by_default and ignore in ids:
        raise ConfigError(
            f"{where}: lists id {ignore} as a class, which is the ignored id unless another is "
            f'named. Write "ignore_id" into it (or set config.data.ignore): {ignore} if the class '
            "is not to count, else an id that no mask holds."
        )
    if not isinstance(ignore, int) or not 0 <= ignore <= 255:
        raise ConfigError(f"{where}: the ignored id is {ignore!r}, expected 0 to 255.")
    if not from_zero and (ignore != 0 or (0 in ids and described.get("ignore_id") != 0)):
        raise ConfigError(
            f"config.data.zero_is_ignored: set, but {where} lists 0 as a class, or another id is "
            "ignored. Leave it off, or list the classes from 1."
        )


def _bad_classes(where: str) -> ConfigError:
    return ConfigError(
        f'{where}: expected {{"classes": [{{"id": 0, "name": "road"}}, ...], "ignore_id": 255}} '
        "or a list of names in the order of their ids."
    )


def read_mask(file: bytes | str | os.PathLike, where: str = "") -> np.ndarray:
    """The ids of a mask as they are stored, uint8 [h, w], turned as EXIF says.

    Args:
      file: encoded, or its path.
      where: what to call it in messages, its path by default.

    Raises:
      ConfigError: no image, colours, or ids beyond 255.
    """
    where = where or str(file)
    try:
        content = file if isinstance(file, bytes) else Path(file).read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            turned = ImageOps.exif_transpose(image) if orientation(image) != UPRIGHT else image
            mask = np.asarray(turned)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{where}: no image that can be read ({error}). Replace it.") from error
    if image.mode not in ("L", "P", "1") and not image.mode.startswith("I"):
        raise ConfigError(
            f"{where}: a mask of mode {image.mode} {list(mask.shape)}, expected one id a pixel, "
            "grey or indexed. Turn its colours into ids of classes."
        )
    if mask.max(initial=0) > 255 or mask.min(initial=0) < 0:
        raise ConfigError(
            f"{where}: ids from {mask.min()} to {mask.max()} in the mask, expected 0 to 255. Give "
            "its classes smaller ids."
        )
    return mask.astype(np.uint8) // _stretched(content)


def _stretched(content: bytes) -> int:
    """By how much Pillow multiplies the ids of a grey PNG, which it spreads over 8 bits.

    Source: PNG specification (third edition), 11.2.1, the header: width and height in bytes 16 to
    23 of the file, then bit depth and colour type.
    """
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return 1
    depth, colour = content[24], content[25]
    return 255 // (2**depth - 1) if colour == 0 and depth in (2, 4) else 1


# EXIF's number of an image that stands as it is stored, and its field for that number.
UPRIGHT, _ORIENTATION = 1, 0x0112
# Those in which height and width change places.
SIDEWAYS = range(5, 9)


def orientation(image: Image.Image) -> int:
    """EXIF's orientation of an image, 1 to 8: how viewers turn and mirror it.

    1, upright, where it tells none, or what viewers pass over: another number, damaged EXIF.
    """
    try:
        found = image.getexif().get(_ORIENTATION, UPRIGHT)
    except (SyntaxError, ValueError, struct.error, KeyError, EOFError):
        return UPRIGHT
    return found if found in range(1, 9) else UPRIGHT
