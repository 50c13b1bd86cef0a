"""What the fields of a config may hold and what they mean: declared once, for checks and for help.

A section of a config is declared as `{name: Field(kind, meaning)}`. Kinds refuse what is no finite
number of their range, so that what gets through can be computed with.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from cropr_jax.errors import ConfigError
from cropr_jax.host.messages import did_you_mean


class Kind(NamedTuple):
    """Values that a field may hold.

    Attributes:
      expected: what they are, in words.
      allows: whether a value is one.
    """

    expected: str
    allows: Callable[[Any], bool]


class Field(NamedTuple):
    """A field of a config.

    Attributes:
      kind: of its values.
      meaning: of the field, in words.
      needed: whether it must be there; if not, None is the same as nothing.
    """

    kind: Kind
    meaning: str
    needed: bool = True


Section = Mapping[str, Field]


# What counters on a device hold.
MOST = 2**31 - 1


def whole(low: int, high: int | None = None) -> Kind:
    """A whole number from `low` to `high`, both included; None for what a counter holds."""
    upper = MOST if high is None else high
    words = f"from {low} to {high}" if high is not None else f"of at least {low}"

    def allows(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= upper

    return Kind(f"a whole number {words}", allows)


def number(
    low: float | int, high: float | int, *, above: bool = False, below: bool = False
) -> Kind:
    """A number from `low` to `high`; with `above` and `below` the ends are not included."""

    def allows(value: Any) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        return (low < value if above else low <= value) and (
            value < high if below else value <= high
        )

    starts = f"above {low:g}" if above else f"from {low:g}"
    ends = f"below {high:g}" if below else f"up to {high:g}" if above else f"to {high:g}"
    return Kind(f"a number {starts}{' and' if above or below else ''} {ends}", allows)


def choice(*options: Any) -> Kind:
    """One of some values, of the same type."""
    return Kind(
        "one of " + ", ".join(map(repr, options)),
        lambda value: any(type(value) is type(one) and value == one for one in options),
    )


def optional(kind: Kind, none: str = "none") -> Kind:
    """A kind, or None, which means what `none` says."""
    return Kind(
        f"{kind.expected}, or None for {none}", lambda value: value is None or kind.allows(value)
    )


def either(first: Kind, second: Kind) -> Kind:
    """What one of two kinds allows."""
    return Kind(
        f"{first.expected}, or {second.expected}",
        lambda value: first.allows(value) or second.allows(value),
    )


def several(kind: Kind, count: int | None = None, *, rising: bool = False) -> Kind:
    """A list or tuple of values of a kind.

    Args:
      kind: of each.
      count: how many, None for any number.
      rising: whether none may be smaller than the one before.
    """

    def allows(value: Any) -> bool:
        listed = isinstance(value, list | tuple) and all(map(kind.allows, value))
        if not listed or (count is not None and len(value) != count):
            return False
        return not rising or list(value) == sorted(value)

    words = f"{count} values" if count is not None else "a list"
    order = ", the smaller one first" if rising else ""
    return Kind(f"{words}, each {kind.expected}{order}", allows)


def _is_regex(value: Any) -> bool:
    try:
        re.compile(value)
    except (re.error, TypeError, RecursionError, OverflowError):
        return False
    return True


FLAG = Kind("True or False", lambda value: isinstance(value, bool))
TEXT = Kind("text", lambda value: isinstance(value, str))
WORD = Kind("a text that is not empty", lambda value: isinstance(value, str) and bool(value))
REGEX = Kind("a regular expression", _is_regex)
SECTION = Kind("a section", lambda value: isinstance(value, Mapping))
ANYTHING = Kind("anything", lambda value: True)
# Height and width in pixels or patches.
SIDE = whole(1, 2**15)
SIZE = several(SIDE, 2)
SHARE = number(0, 1)


def check_names(where: str, section: Section, values: Any) -> None:
    """Refuses a section with unknown or missing fields.

    Args:
      where: its name in messages, such as 'config.optimizer'.
      section: what it may have.
      values: of the config.

    Raises:
      ConfigError: naming the field, with the names that come close.
    """
    if not isinstance(values, Mapping):
        needed = sorted(name for name, field in section.items() if field.needed)
        raise ConfigError(f"{where}: found {values!r}, expected a section with {needed}")
    for name in values:
        if name not in section:
            raise ConfigError(f"{where}.{name}: no such field; {did_you_mean(name, section)}")
    for name, field in sorted(section.items()):
        if field.needed and name not in values:
            raise ConfigError(f"{where}.{name} is missing")


def check_values(
    where: str, section: Section, values: Mapping[str, Any], but: Collection[str] = ()
) -> None:
    """Refuses values that are not of their field's kind.

    Args:
      where: name of the section in messages.
      section: what it may have; values of other names are passed over.
      values: of the config.
      but: names that are passed over too.

    Raises:
      ConfigError: naming the field, what was found, what was expected, and what the field means.
    """
    for name, value in values.items():
        field = section.get(name)
        if field is None or name in but or (value is None and not field.needed):
            continue
        if not field.kind.allows(value):
            raise ConfigError(
                f"{where}.{name}: found {_short(value)}, expected {field.kind.expected} "
                f"({field.meaning})"
            )


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."
