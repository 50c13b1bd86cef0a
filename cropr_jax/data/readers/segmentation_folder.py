"""Images and masks that lie in folders, one's own for example.

`root/images/SPLIT/NAME.jpg` (or png, webp) and `root/labels/SPLIT/NAME.png`, or both without the
folders of splits: then there is one split, `all`, of which slices can be taken. `root/meta.json`
names the classes (`annotations.make_legend`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cropr_jax.data.annotations import (
    SIDEWAYS,
    UPRIGHT,
    Legend,
    make_legend,
    orientation,
    read_mask,
)
from cropr_jax.data.readers.image_folder import SUFFIXES
from cropr_jax.data.records import MAP
from cropr_jax.errors import ConfigError
from cropr_jax.host.files import read_json


@dataclass(frozen=True)
class MaskFiles:
    """A split as a list of images and masks.

    Attributes:
      images, masks: the files, sorted by name.
      legend: what the masks mean.
      size: greatest height and width of a mask.
      counts: pixels of every id in all masks.
    """

    images: tuple[str, ...]
    masks: tuple[str, ...]
    legend: Legend
    size: tuple[int, int]
    counts: tuple[int, ...]

    kind = MAP

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.legend.class_names

    @property
    def notes(self) -> tuple[str, ...]:
        """What is odd of the split, in words."""
        legend = self.legend
        named = zip(legend.ids, legend.class_names, strict=True)
        missing = [name for number, name in named if not self.counts[number]]
        if not missing:
            return ()
        listed = ", ".join(map(repr, missing[:5])) + (", ..." if len(missing) > 5 else "")
        return (f"{len(missing)} of {len(legend.ids)} classes are in no mask: {listed}",)

    def largest(self) -> tuple[int, int]:
        return self.size

    def __len__(self) -> int:
        return len(self.masks)

    def __call__(self, index: int) -> tuple[bytes, np.ndarray]:
        mask = read_mask(self.masks[index])
        return Path(self.images[index]).read_bytes(), self.legend.labels(mask, self.masks[index])

    def where(self, index: int) -> str:
        return self.images[index]


def open_segmentation_folder(root: Path, split: str, data: Mapping[str, Any]) -> MaskFiles:
    """The images and masks of one split, every one of them looked at.

    All masks are decoded, once in a process, so that a bad one is found before training.

    Args:
      root: the data set's folder.
      split: name of the folders below `images` and `labels`, or `all` where there are none.
      data: `config.data`; see `make_legend`.

    Raises:
      ConfigError: naming the file: no such split, an empty folder, an image without a mask or the
        other way round, a mask in colours, of another size than its image or with an id that is
        no class, a list of classes that cannot be read.
    """
    meta = root / "meta.json"
    if not meta.is_file():
        raise ConfigError(
            f"data set in {root}: no meta.json, which names the classes. Write "
            '{"classes": [{"id": 0, "name": "road"}, ...], "ignore_id": 255}.'
        )
    legend = make_legend(read_json(meta), data, str(meta))
    images, labels = _folders(root, split)
    # What is added, removed or replaced changes a folder's time.
    return _checked(images, labels, legend, images.stat().st_mtime_ns, labels.stat().st_mtime_ns)


def _folders(root: Path, split: str) -> tuple[Path, Path]:
    images, labels = root / "images", root / "labels"
    for folder in (images, labels):
        if not folder.is_dir():
            raise ConfigError(
                f"data set in {root}: no folder {folder.name!r}. Expected images/{split}/*.jpg "
                f"and labels/{split}/*.png in it, or set config.data.dir."
            )
    found = sorted(entry.name for entry in images.iterdir() if entry.is_dir())
    splits = [name for name in found if not name.startswith(".")] or ["all"]
    if split not in splits:
        raise ConfigError(
            f"data split {split!r}: {images} has {', '.join(splits)}. Name one of them, or a "
            f"slice such as '{splits[0]}[:80%]'."
        )
    if splits == ["all"] and not (images / "all").is_dir():
        return images, labels
    if not (labels / split).is_dir():
        raise ConfigError(f"data split {split!r}: {images / split}, but no {labels / split}.")
    return images / split, labels / split


@functools.lru_cache(maxsize=8)
def _checked(images: Path, labels: Path, legend: Legend, *_times: int) -> MaskFiles:
    pictures, masks = _by_name(images, SUFFIXES), _by_name(labels, frozenset({".png"}))
    alone = sorted(pictures.keys() ^ masks.keys())
    if alone:
        name = alone[0]
        raise ConfigError(
            f"{(pictures.get(name) or masks[name])}: no {'mask' if name in pictures else 'image'} "
            f"of that name in {labels if name in pictures else images}, and so with {len(alone)} "
            "files altogether. Add it, or take the file away."
        )
    names = sorted(pictures)

    def look(name: str) -> tuple[tuple[int, int], np.ndarray]:
        return _look(pictures[name], masks[name], legend)

    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, 16)) as threads:
        sizes, counted = zip(*threads.map(look, names), strict=True)
    height, width = np.array(sizes).max(0).tolist()
    counts = tuple(np.sum(counted, axis=0).tolist())
    _check_counts(counts, legend, labels)
    files = (tuple(str(found[name]) for name in names) for found in (pictures, masks))
    return MaskFiles(*files, legend, (height, width), counts)


def _check_counts(counts: Sequence[int], legend: Legend, folder: Path) -> None:
    """Refuses a split in which nothing counts, or the foreground does not for want of a word.

    Args:
      counts: pixels of every id.
      legend: of the ids.
      folder: of the masks, for messages.

    Raises:
      ConfigError: naming the ignored id and where it is said.
    """
    ignored, known = counts[legend.ignore], [counts[number] for number in legend.ids]
    if not any(known):
        raise ConfigError(
            f"{folder}: no pixel of its masks counts, all {ignored} are of the ignored id "
            f'{legend.ignore}. Mend "ignore_id" in meta.json or config.data.ignore, or the masks.'
        )
    # Pixels of the commonest class are the background of most data sets.
    foreground = sum(known) - max(known)
    if legend.by_default and ignored > foreground:
        raise ConfigError(
            f"{folder}: {ignored / sum(counts):.0%} of the pixels have the id {legend.ignore}, "
            "ignored since nothing says otherwise; all classes but the commonest have "
            f"{foreground / sum(counts):.0%}. If {legend.ignore} is a class, list it in meta.json "
            'and name another "ignore_id"; if it is to be ignored, write "ignore_id": '
            f"{legend.ignore} there, or set config.data.ignore."
        )


def _by_name(folder: Path, suffixes: frozenset[str]) -> dict[str, Path]:
    """The files of a folder by their names without suffix."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() not in suffixes:
            continue
        if path.stem in found:
            raise ConfigError(f"{path}: beside {found[path.stem].name}; which of the two is it?")
        found[path.stem] = path
    if not found:
        raise ConfigError(f"{folder}: no {', '.join(sorted(suffixes))} file in it. Put them there.")
    return found


def _look(picture: Path, mask: Path, legend: Legend) -> tuple[tuple[int, int], np.ndarray]:
    """Size (h, w) of a mask and its pixels by id, after all that can be wrong with it."""
    ids = read_mask(mask)
    try:
        with Image.open(picture) as image, Image.open(mask) as beside:
            turns, size = (orientation(image), orientation(beside)), (image.height, image.width)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{picture}: no image that can be read ({error}).") from error
    stored, size = size, (size[1], size[0]) if turns[0] in SIDEWAYS else size
    # A mask that was drawn on the upright photo has its size, and cannot be taken for another.
    drawn_upright = turns[1] == UPRIGHT and size == ids.shape != stored
    if turns[0] != turns[1] and not drawn_upright:
        raise ConfigError(
            f"{picture}: EXIF says orientation {turns[0]}, of its mask {mask} {turns[1]}, so that "
            "they may lie askew. Store both upright and without EXIF's orientation."
        )
    if size != ids.shape:
        raise ConfigError(
            f"{mask}: {ids.shape[0]}x{ids.shape[1]} pixels (height x width), but {picture} has "
            f"{size[0]}x{size[1]}. Make them of one size."
        )
    legend.labels(ids, str(mask))
    return size, np.bincount(ids.ravel(), minlength=256)
