"""One numbering of classes for all splits of a run: labels are matched by what they stand for."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from cropr_jax.data.records import CLASS, IGNORE, MAP, MapReader, Reader, Source
from cropr_jax.errors import ConfigError
from cropr_jax.host.messages import did_you_mean

# Names that a message lists.
_FEW = 3


@dataclasses.dataclass(frozen=True)
class Renumbered:
    """A reader with the labels of other class names.

    Attributes:
      reader: of the examples.
      table: new label by old one; of maps uint8 [256], where `IGNORE` stays.
      class_names: by new label.
    """

    reader: Reader
    table: np.ndarray
    class_names: tuple[str, ...]

    @property
    def kind(self) -> str:
        return self.reader.kind

    def __len__(self) -> int:
        return len(self.reader)

    def __call__(self, index: int) -> tuple[bytes | np.ndarray, Any]:
        image, label = self.reader(index)
        if np.min(label) < 0:
            raise ConfigError(f"{self.where(index)}: label {np.min(label)}, expected 0 or more")
        found = self.table[label]
        return image, found if isinstance(label, np.ndarray) else int(found)

    def largest(self) -> tuple[int, int]:
        if not isinstance(self.reader, MapReader):
            raise TypeError(f"the labels of {type(self.reader).__name__} are no maps")
        return self.reader.largest()

    @property
    def notes(self) -> tuple[str, ...]:
        return getattr(self.reader, "notes", ())

    def where(self, index: int) -> str:
        return Source(self.reader, 0, len(self)).where(index)


def _numbers(names: Sequence[str]) -> bool:
    """Whether classes are named by their numbers, as they are where nothing names them."""
    return list(names) == [str(number) for number in range(len(names))]


def _same_numbers(own: Sequence[str], names: Sequence[str]) -> bool:
    """Whether the classes are numbered alike, though not all are named on both sides.

    A class without a name is called by its number. Numbers alone say nothing of names.
    """
    if len(own) > len(names):
        return False
    if _numbers(own) and _numbers(names):
        return True
    named = [
        one == other
        for number, (one, other) in enumerate(zip(own, names, strict=False))
        # Two numbers that differ are names: folders sort as text, 10 before 2.
        if str(number) not in (one, other) or (one.isdigit() and other.isdigit())
    ]
    return bool(named) and all(named)


def _few(names: Sequence[str]) -> str:
    listed = ", ".join(map(repr, names[:_FEW]))
    return listed if len(names) <= _FEW else f"{listed} and {len(names) - _FEW} more"


def aligned(source: Source, names: Sequence[str], what: str, of: str) -> Source:
    """The same examples with labels by the place that their class's name has among `names`.

    Args:
      source: of the examples.
      names: of the run's classes, by label.
      what: the source, for messages.
      of: whose names those are, for messages.

    Raises:
      ConfigError: if the source has a class whose name is not among them.
    """
    own = source.class_names
    if own == tuple(names) or source.reader.kind not in (CLASS, MAP):
        return source
    if _numbers(own) and _numbers(names) and len(own) > len(names):
        return source  # labels beyond those names, which the head may have
    places = {name: label for label, name in enumerate(names)}
    if not set(own) <= places.keys() and _same_numbers(own, names):
        return _renumbered(source, range(len(own)), names)
    for found, whose in ((own, what), (names, of)):
        twice = sorted(name for name, count in Counter(found).items() if count > 1)
        if twice:
            raise ConfigError(
                f"{whose}: {_few(twice)} names several classes, so that they cannot be told apart "
                "by name. Give each class a name of its own."
            )
    unknown = [name for name in own if name not in places]
    if unknown:
        hint = did_you_mean(unknown[0], names)
        close = f"; {hint}" if hint.startswith("did you mean") else "."
        raise ConfigError(
            f"{what}: {len(unknown)} of its {len(own)} classes ({_few(unknown)}) "
            f"{'is' if len(unknown) == 1 else 'are'} not among the {len(names)} of {of} "
            f"({_few(tuple(names))}){close} Labels are matched by the names of their classes: "
            "give them the same names, or take these examples out."
        )
    return _renumbered(source, [places[name] for name in own], names)


def _renumbered(source: Source, numbers: Sequence[int], names: Sequence[str]) -> Source:
    table = np.array(numbers, np.int64)
    if source.reader.kind == MAP:
        table = np.full(256, IGNORE, np.uint8)
        table[: len(numbers)] = numbers
    reader = Renumbered(source.reader, table, tuple(names))
    return dataclasses.replace(source, reader=reader)
