"""Names from files, as messages show them."""

from collections.abc import Iterable

LISTED = 8


def shown(text: str) -> str:
    """Text from a file, quoted, escaped and cut short for a message."""
    return ascii(text if len(text) <= 80 else text[:77] + "...")


def listed(names: Iterable[str], most: int = LISTED) -> str:
    """Names for a message, the first of many only."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
