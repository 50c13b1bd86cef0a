"""Opens the data set that a config names: readers by `config.data.source`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cropr_jax.data.classes import aligned
from cropr_jax.data.records import Reader, Source, data_root, parse_split
from cropr_jax.errors import ConfigError

# Opens a named split of `config.data`.
Open = Callable[[Mapping[str, Any], str], Reader]

# Only what is used is imported: TFDS takes a second, and image folders do without it.


def _tfds(data: Mapping[str, Any], split: str) -> Reader:
    from cropr_jax.data.readers.tfds import open_tfds

    return open_tfds(data, split)


def _arrays(data: Mapping[str, Any], split: str) -> Reader:
    from cropr_jax.data.readers.arrays import Arrays

    return Arrays.from_folder(data_root(data, data.get("env", "")), split)


def _image_folder(data: Mapping[str, Any], split: str) -> Reader:
    from cropr_jax.data.readers.image_folder import open_image_folder

    root = data_root(data, data.get("env", ""))
    return open_image_folder(root, split, data.get("num_classes", 0))


def _segmentation_folder(data: Mapping[str, Any], split: str) -> Reader:
    from cropr_jax.data.readers.segmentation_folder import open_segmentation_folder

    return open_segmentation_folder(data_root(data, data.get("env", "")), split, data)


def _fake(data: Mapping[str, Any], split: str) -> Reader:
    from cropr_jax.data.readers.fake import Fake

    return Fake(**_made_up(data))


def _fake_segmentation(data: Mapping[str, Any], split: str) -> Reader:
    from cropr_jax.data.readers.fake import FakeMaps

    return FakeMaps(**_made_up(data))


def _made_up(data: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("num_examples", "image_size", "num_classes"):
        if not data.get(name):
            raise ConfigError(
                f"config.data.{name}: found {data.get(name)!r}, but made-up data "
                f"(source={data['source']!r}) need it. Set a number, or another source."
            )
    return {
        "num_examples": data["num_examples"],
        "image_size": tuple(data["image_size"]),
        "num_classes": data["num_classes"],
    }


# What each reads of `config.data`; all but the made-up ones take the folder from `dir` or, where
# that is empty, from the environment variable `env`.
READERS: dict[str, Open] = {
    # `name`; TFDS-prepared, array_record or tfrecord.
    "tfds": _tfds,
    # `dir/{split}*.npz` with images, labels, class_names.
    "arrays": _arrays,
    # `dir/split/class/*.jpg` or `labels.json`; `num_classes` where the numbers in a labels.json do
    # not reach the last class.
    "image_folder": _image_folder,
    # `dir/images/split/*.jpg`, `dir/labels/split/*.png`, `dir/meta.json`; `ignore`,
    # `zero_is_ignored`, see `annotations.make_legend`.
    "segmentation_folder": _segmentation_folder,
    # `num_examples`, `image_size`, `num_classes`: made-up images with a class each, or with a map.
    "fake": _fake,
    "fake_segmentation": _fake_segmentation,
}


def open_source(data: Mapping[str, Any], split: str) -> Source:
    """Opens one split of the data set that a config's `data` names.

    Args:
      data: `config.data`; `source` is one of `READERS`, which say what else is read.
      split: such as `'train'`, `'train[:99%]'`, `'validation[100:200]'`.

    Raises:
      ConfigError: the data set or the split is not there; the message says what was looked for,
        where, and which variable to set.
    """
    name, bounds = parse_split(split)
    if data["source"] not in READERS:
        raise ConfigError(
            f"config.data.source is {data['source']!r}, expected one of {', '.join(READERS)}."
        )
    reader = READERS[data["source"]](data, name)
    return Source(reader, *bounds(len(reader)))


class Splits:
    """The splits of a config's data set, each opened once, when it is first asked for.

    All have the classes of the training split, or those of a run that was trained before: labels
    are matched by name (`cropr_jax.data.classes`).
    """

    def __init__(self, data: Mapping[str, Any], class_names: Sequence[str] = ()):
        """Opens nothing.

        Args:
          data: `config.data`.
          class_names: of the run, by label; empty for those of the training split.
        """
        self._data = data
        self._class_names = tuple(class_names)
        self._opened: dict[str, Source] = {}
        self._matched: dict[str, Source] = {}

    @property
    def train(self) -> Source:
        """The training examples.

        Raises:
          ConfigError: if they cannot be opened, or have classes that the run has not.
        """
        split = self._data["train"]
        if not self._class_names:
            return self._open(split)
        return self._aligned(split, self._class_names, "the run")

    def eval(self, name: str) -> Source:
        """The evaluation split called `name` in the config.

        Raises:
          ConfigError: if there is none, or it has classes that the training split has not.
        """
        splits = dict(self._data["eval"])
        if name not in splits:
            raise ConfigError(
                f"config.data.eval has no {name!r}, only {', '.join(splits)}. Name one of them."
            )
        names, of = self._class_names, "the run"
        if not names:
            names, of = self.train.class_names, f"the training split '{self._data['train']}'"
        return self._aligned(splits[name], names, of)

    def _aligned(self, split: str, names: Sequence[str], of: str) -> Source:
        if split not in self._matched:
            source = self._open(split)
            self._matched[split] = aligned(source, names, f"data split '{split}'", of)
        return self._matched[split]

    def _open(self, split: str) -> Source:
        if split not in self._opened:
            self._opened[split] = open_source(self._data, split)
        return self._opened[split]
