"""What the commands share: their parser, words by comma, lines of progress, errors in one line."""

import argparse
import sys
import time
from collections.abc import Callable

from cropr_jax.errors import ConfigError
from cropr_jax.host.messages import printable


def parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m COMMAND`, whose help is the text as it stands."""
    return argparse.ArgumentParser(
        prog=f"python -m {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def words(text: str) -> tuple[str, ...]:
    """'a,b' -> ('a', 'b').

    Raises:
      ValueError: on an empty word, which argparse reports.
    """
    found = tuple(text.split(","))
    if not all(found):
        raise ValueError(f"empty word in {text!r}")
    return found


def numbers(text: str) -> tuple[int, ...]:
    """'0,1' -> (0, 1)."""
    return tuple(map(int, words(text)))


def say(line: str) -> None:
    """A line of progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


def run(main: Callable[[], None]) -> None:
    """Runs a command; what the user has to mend ends it in one line, with status 2."""
    try:
        main()
    except ConfigError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
