"""Image data sets that lie in folders, one's own for example.

Two layouts: `root/split/class/*.jpg` (jpg, jpeg, png, webp), or a `labels.json` in `root/split/` or
`root/` with the files in `images/` beside it: `{"images": [{"file_name": "a.jpg", "label": 3,
"name": "cat"}, ...]}`, or simply `{"a.jpg": 3, ...}`. Labels may be numbers or class names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cropr_jax.data.records import CLASS
from cropr_jax.errors import ConfigError
from cropr_jax.host.files import read_json

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})


@dataclass(frozen=True)
class ImageFiles:
    """A split as a list of image files.

    Attributes:
      paths: the files, sorted by class and name (in a labels.json: as listed).
      labels: class of each.
      class_names: sorted.
      notes: what was left out, and classes without an image.
    """

    paths: tuple[str, ...]
    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    notes: tuple[str, ...] = ()

    kind = CLASS

    def __len__(self) -> int:
        return len(self.labels)

    def __call__(self, index: int) -> tuple[bytes, int]:
        return Path(self.paths[index]).read_bytes(), self.labels[index]

    def where(self, index: int) -> str:
        return self.paths[index]


def open_image_folder(root: Path, split: str, num_classes: int = 0) -> ImageFiles:
    """The images of one split.

    Args:
      root: the data set's folder.
      split: its name.
      num_classes: how many classes there are at least, for a labels.json of numbers that do not
        reach the last class (a sample of ImageNet).

    Raises:
      ConfigError: neither layout is found, or a file named in labels.json is missing.
    """
    for listing in (root / split / "labels.json", root / "labels.json"):
        if listing.is_file():
            return _from_listing(listing, num_classes)
    if not (root / split).is_dir():
        found = ", ".join(sorted(p.name for p in root.iterdir())[:10]) or "nothing"
        raise ConfigError(
            f"data split {split!r}: neither {root / split}/<class>/*.jpg nor "
            f"{root / 'labels.json'}; {root} holds {found}. Set config.data.dir (or the variable "
            "in config.data.env), or another split."
        )
    folders = [d for d in (root / split).iterdir() if d.is_dir() and not _is_hidden(d.name)]
    names = sorted(folder.name for folder in folders)
    numbers = {name: number for number, name in enumerate(names)}
    files = [p for folder in folders for p in folder.rglob("*") if not _is_hidden(p.name)]
    paths = sorted(p for p in files if p.suffix.lower() in SUFFIXES and p.parent.name in numbers)
    paths = [path for path in paths if path.parent.parent == root / split]
    if not paths:
        raise ConfigError(
            f"data split {split!r}: no {', '.join(sorted(SUFFIXES))} file in "
            f"{root / split}/<class>/. Put the images there, in one folder for each class."
        )
    labels = tuple(numbers[path.parent.name] for path in paths)
    notes = _notes(names, labels, [path for path in files if path.is_file()], paths)
    return ImageFiles(tuple(map(str, paths)), labels, tuple(names), notes)


def _notes(
    names: list[str], labels: Sequence[int], files: list[Path], taken: list[Path]
) -> tuple[str, ...]:
    """What is left out of a folder, by suffix, and classes that have no image."""
    empty = [name for number, name in enumerate(names) if number not in set(labels)]
    left = Counter(
        "in deeper folders" if path.suffix.lower() in SUFFIXES else path.suffix or "without suffix"
        for path in set(files).difference(taken)
    )
    said = [f"no image in {len(empty)} classes: {', '.join(empty[:5])}"] if empty else []
    if left:
        listed = ", ".join(f"{count} {suffix}" for suffix, count in sorted(left.items()))
        said.append(f"{sum(left.values())} files are left out: {listed}")
    return tuple(said)


def _is_entry(entry: Any) -> bool:
    """Whether an entry of a list names a file and a label."""
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("file_name"), str)
        and isinstance(entry.get("label"), int | str)
        and not isinstance(entry.get("label"), bool)
        and isinstance(entry.get("name", ""), str)
    )


def _is_hidden(name: str) -> bool:
    """Whether a name is that of what systems leave behind: `.DS_Store`, `._a.jpg`, `__MACOSX`."""
    return name.startswith(".") or name == "__MACOSX"


def _from_listing(listing: Path, num_classes: int) -> ImageFiles:
    content = read_json(listing)
    if isinstance(content, dict) and isinstance(content.get("images"), list):
        entries = content["images"]
    elif isinstance(content, dict):
        entries = [{"file_name": name, "label": label} for name, label in content.items()]
    else:
        entries = []
    if not entries or not all(map(_is_entry, entries)):
        raise ConfigError(
            f'{listing}: expected {{"images": [{{"file_name": ..., "label": ...}}, ...]}} or '
            '{"file.jpg": label, ...} with at least one image.'
        )
    folder = listing.parent / "images"
    folder = folder if folder.is_dir() else listing.parent
    paths = [folder / entry["file_name"] for entry in entries]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(
            f"{listing}: names {len(missing)} files that do not exist, the first {missing[0]}. "
            "Add them, or take them out of the list."
        )
    names = content.get("class_names") if isinstance(content.get("images"), list) else None
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise ConfigError(f"{listing}: class_names are {names!r:.100}, expected a list of names.")
    labels, class_names = _number(listing, entries, names, num_classes)
    return ImageFiles(tuple(map(str, paths)), labels, class_names)


def _number(
    listing: Path, entries: list[dict[str, Any]], names: list[str] | None, num_classes: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Labels as numbers, and the name of every number."""
    values = [entry["label"] for entry in entries]
    if all(isinstance(value, str) for value in values):
        names = sorted(set(values)) if names is None else names
        unknown = set(values) - set(names)
        if unknown:
            raise ConfigError(f"{listing}: label {min(unknown)!r} is not among its class_names.")
        return tuple(names.index(value) for value in values), tuple(names)
    if not all(isinstance(value, int) and value >= 0 for value in values):
        raise ConfigError(f"{listing}: labels must be all names, or all numbers from 0.")
    if names is None:
        count = max(max(values) + 1, num_classes)
        told = {entry["label"]: entry["name"] for entry in entries if "name" in entry}
        names = [told.get(number, str(number)) for number in range(count)]
    if max(values) >= len(names):
        raise ConfigError(
            f"{listing}: label {max(values)}, expected 0 to {len(names) - 1} "
            f"({len(names)} class_names)."
        )
    return tuple(values), tuple(names)
