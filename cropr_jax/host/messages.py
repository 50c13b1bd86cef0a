"""Words for the user: choices, slips of the pen."""

import difflib
from collections.abc import Iterable
from typing import Any

from cropr_jax.errors import ConfigError


def check_choice(field: str, value: Any, options: Iterable[Any]) -> Any:
    """`value`, if it is one of `options`.

    Args:
      field: of the config, without its 'config.'.
      value: found there.
      options: what may stand there.

    Raises:
      ConfigError: naming the field and the options otherwise.
    """
    if value not in options:
        expected = ", ".join(map(repr, options))
        raise ConfigError(f"config.{field}: found {value!r}, expected one of {expected}")
    return value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the known names that come close to an unknown one, or at all of them."""
    known = sorted(known)
    if close := difflib.get_close_matches(name, known, 3, 0.5):
        return f"did you mean {' or '.join(close)}?"
    return f"there are {', '.join(known)}" if known else "there are none below it"


def printable(text: str) -> str:
    """A text that every file and terminal can take: what UTF-8 has not is escaped.

    Names of files that are not UTF-8 reach Python as lone surrogates.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
