"""Image data sets that lie in npz files as whole arrays."""

from __future__ import annotations

import functools
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cropr_jax.data.records import CLASS
from cropr_jax.errors import ConfigError


@dataclass(frozen=True)
class Arrays:
    """A split held in memory.

    Attributes:
      images: uint8 [n, h, w, c], c = 3 or 1.
      labels: int64 [n], 0 <= label < number of classes.
      class_names: name of each class.
      place: where they lie, in words.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    place: str

    kind = CLASS

    def __len__(self) -> int:
        return len(self.labels)

    def __call__(self, index: int) -> tuple[np.ndarray, int]:
        return self.images[index], int(self.labels[index])

    def where(self, index: int) -> str:
        return f"{self.place}, example {index}"

    @classmethod
    def from_folder(cls, folder: Path, split: str) -> Arrays:
        """All `{split}*.npz` of a folder, in the order of their names.

        Each holds `images` uint8 [n, h, w, 3], [n, h, w, 1] or [n, h, w], `labels` int [n] and,
        optionally, `class_names` (else the classes are named by number).

        Raises:
          ConfigError: no such file, a missing key, or arrays of another type or shape.
        """
        paths = sorted(folder.glob(f"{split}*.npz"))
        if not paths:
            found = ", ".join(sorted(p.name for p in folder.glob("*.npz"))) or "no npz file"
            raise ConfigError(
                f"data split {split!r}: no {folder / split}*.npz; the folder holds {found}. "
                "Set config.data.dir (or the variable in config.data.env), or another split."
            )
        images, labels, names = zip(
            *(_read(path, path.stat().st_mtime_ns) for path in paths), strict=True
        )
        if len({array.shape[1:] for array in images}) > 1 or len(set(names)) > 1:
            raise ConfigError(
                f"data split {split!r}: {', '.join(p.name for p in paths)} in {folder} have "
                "images of different shapes or different class_names. Make them alike."
            )
        all_labels = np.concatenate(labels)
        if not len(all_labels):
            raise ConfigError(f"{paths[0]}: no example in it. Write the images and labels again.")
        count = int(all_labels.max()) + 1
        class_names = names[0] or tuple(str(i) for i in range(count))
        if all_labels.min() < 0 or count > len(class_names):
            raise ConfigError(
                f"{paths[0]}: labels from {all_labels.min()} to {count - 1}, expected 0 to "
                f"{len(class_names) - 1} ({len(class_names)} class_names). Mend the file."
            )
        whole = images[0] if len(images) == 1 else np.concatenate(images)
        return cls(whole, all_labels, class_names, f"{folder / split}*.npz")


# A run opens a split several times, for its size, its classes and its batches, and unpacking a
# compressed file takes seconds.
@functools.lru_cache(maxsize=8)
def _read(path: Path, modified: int) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    try:
        return _unpacked(path)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path}: no npz file that can be read ({type(error).__name__}: {error}). Write it "
            "again with np.savez: images uint8 [n, h, w, 3], labels int [n]."
        ) from error


def _unpacked(path: Path) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    with path.open("rb") as opened:
        file = np.load(opened)
        if isinstance(file, np.ndarray):
            raise ValueError("a single array")
        missing = {"images", "labels"} - set(file.files)
        if missing:
            raise ConfigError(
                f"{path}: no {' and '.join(sorted(missing))} in it, found {sorted(file.files)}. "
                "Store images uint8 [n, h, w, 3] and labels int [n]."
            )
        # Every access to a member unpacks it again, so each is read once.
        images, labels = file["images"], file["labels"]
        names = tuple(str(name) for name in file["class_names"]) if "class_names" in file else ()
    if images.ndim == 3:
        images = images[..., None]
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise ConfigError(
            f"{path}: images are {images.dtype} {list(images.shape)}, expected uint8 "
            "[n, h, w, 3], [n, h, w, 1] or [n, h, w]."
        )
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        raise ConfigError(
            f"{path}: labels are {labels.dtype} {list(labels.shape)}, expected integers "
            f"[{len(images)}]."
        )
    images.flags.writeable = False
    return images, labels.astype(np.int64), names
