"""Files that are whole at any moment: written beside, then renamed."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cropr_jax.errors import ConfigError


def write_json(path: Path, content: Any, indent: int = 2) -> None:
    """Writes beside and renames, so that a kill leaves the old file or the new one.

    Raises:
      ValueError: on a number that is not finite, for which JSON has no word.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(json.dumps(content, indent=indent, allow_nan=False) + "\n")
    beside.replace(path)


@contextlib.contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """A file to write; it becomes `path` when all went well.

    Raises:
      ConfigError: if `path` exists, or cannot be written.
    """
    target = Path(path).expanduser()
    if target.exists():
        raise ConfigError(f"'{target}' exists; remove it or name another file")
    if not target.parent.is_dir():
        raise ConfigError(f"'{target}' cannot be written: there is no folder '{target.parent}'")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield part
        part.rename(target)
    except OSError as error:
        raise ConfigError(f"'{target}' cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)
