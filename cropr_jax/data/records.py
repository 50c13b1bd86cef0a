"""What data sets consist of: records, readers of whole splits, sources of parts of them.

A record is `{'image': encoded bytes or uint8 [h, w, c], 'label': int or map, 'id': int}`. A map is
uint8 [h, w] of class numbers, `IGNORE` where a pixel does not count, whatever ids the files have.
The id is the index of the example in its named split, also when only a part of the split is read:
example 100 of `train` has id 100 in `train[100:200]`. Images stay encoded, so that decoding happens
in the workers. Sources are picklable; each process opens its own files.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from cropr_jax.errors import ConfigError, ExampleError

Record = Mapping[str, Any]
# What a record becomes: arrays by name, of the same shapes for all examples.
Example = dict[str, Any]

# Kinds of labels.
CLASS, MAP = "one class an image", "maps"
# What maps hold where no class counts.
IGNORE = 255
# Names of the filters by which images are resized.
FILTERS = ("bicubic", "bilinear", "lanczos", "nearest")
# What no content of a file makes a correct program raise.
_SLIPS = (TypeError, AttributeError, NameError, AssertionError, ImportError, NotImplementedError)
_SPLIT = re.compile(r"(\w+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")


@runtime_checkable
class Reader(Protocol):
    """A whole named split: image (encoded bytes or uint8 [h, w, c]) and label by index.

    It may have a method `where(index)`, which names the file of an example for messages, and
    `notes`, lines on what is odd of the split.

    Attributes:
      kind: of the labels: `CLASS`, a number, `MAP`, uint8 [h, w] of them, or another, in words.
    """

    @property
    def kind(self) -> str: ...

    @property
    def class_names(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def __call__(self, index: int) -> tuple[bytes | np.ndarray, Any]: ...


@runtime_checkable
class MapReader(Reader, Protocol):
    """A `Reader` whose labels are maps."""

    def largest(self) -> tuple[int, int]:
        """The greatest height and the greatest width of its maps, in pixels."""
        ...


@dataclass(frozen=True)
class Source:
    """Examples `start` to `stop` of a split, in the split's own order.

    Attributes:
      reader: the whole split.
      start, stop: the part of it that is read.
    """

    reader: Reader
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The record of an example.

        Raises:
          ExampleError: if it cannot be read.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        number = self.start + int(index)
        with self.reading(number):
            image, label = self.reader(number)
        return {"image": image, "label": label, "id": number}

    @contextlib.contextmanager
    def reading(self, number: int) -> Iterator[None]:
        """Context in which what goes wrong with an example names its file.

        Args:
          number: of the example in its split.

        Raises:
          ExampleError: instead of what a damaged file makes a library raise. Errors that are slips
            of a program, and those that name what is wrong already, stay as they are.
        """
        try:
            yield
        except (ConfigError, *_SLIPS):
            raise
        except Exception as error:
            raise ExampleError(
                f"{self.where(number)}: the example cannot be read ({type(error).__name__}: "
                f"{_first_line(error)}). Replace the file, or take it out of the data set."
            ) from error

    def where(self, number: int) -> str:
        """Where the example of that number in its split lies, in words."""
        where = getattr(self.reader, "where", None)
        return where(number) if where else f"example {number} of {type(self.reader).__name__}"

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.reader.class_names

    @property
    def num_classes(self) -> int:
        return len(self.reader.class_names)


class Examples(NamedTuple):
    """A split and what its records become.

    Attributes:
      source: of the records.
      transform: of a record to an example; for training with a generator of random numbers.
      filler: an example that counts for nothing. It fills the last batch of an evaluation, and
        tells how large all of them are.
    """

    source: Source
    transform: Callable[..., Example]
    filler: Example

    @property
    def bytes(self) -> int:
        """Size of an example in memory."""
        return sum(np.asarray(value).nbytes for value in self.filler.values())


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or "no reason is given"


def parse_split(split: str) -> tuple[str, Callable[[int], tuple[int, int]]]:
    """`'train[10%:500]'` to its name and a function from the split's size to (start, stop).

    The same strings, with the same rounding, as TFDS's slicing API: `name`, `name[a:b]`, where a
    bound is a number of examples, or per cent with `%`, counted from the end when negative.

    Raises:
      ConfigError: another string (sums of splits have no index of their own, so no ids).
    """
    match = _SPLIT.fullmatch(split)
    if match is None:
        raise ConfigError(
            f"data split {split!r}: expected a name with at most one slice, such as 'train', "
            "'train[:99%]' or 'train[100:200]'."
        )
    name, low, high = match.groups()

    def bounds(size: int) -> tuple[int, int]:
        start = 0 if low is None else _bound(low, size)
        stop = size if high is None else _bound(high, size)
        if not 0 <= start < stop <= size:
            raise ConfigError(
                f"data split {split!r}: examples {start} to {stop} of {size} are none or do not "
                "exist. Choose a slice inside the split."
            )
        return start, stop

    return name, bounds


def _bound(text: str, size: int) -> int:
    value = int(text.rstrip("%"))
    if text.endswith("%"):
        value = int(round(value * size / 100.0))
    return size + value if value < 0 else value


def data_root(data: Mapping[str, Any], env: str = "", default: str = "") -> Path:
    """The folder of the data set: `data.dir`, else the environment variable `env`, else `default`.

    Raises:
      ConfigError: neither is given, or the folder does not exist.
    """
    folder = data.get("dir", "") or (os.environ.get(env, "") if env else "") or default
    setting = f"the environment variable {env} or config.data.dir" if env else "config.data.dir"
    if not folder:
        raise ConfigError(
            f"data set {data.get('name', data['source'])!r}: no folder given. Set {setting}."
        )
    path = Path(os.path.expanduser(folder))
    if not path.is_dir():
        raise ConfigError(
            f"data set {data.get('name', data['source'])!r}: {path} is no folder. "
            f"Put the data there, or set {setting}."
        )
    return path
