"""Files that are whole at any moment: written beside, then renamed."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cropr_jax.errors import ConfigError

# Of a folder that one process has.
LOCK = ".lock"


def write_json(path: Path, content: Any, indent: int = 2) -> None:
    """Writes beside and renames, so that a kill leaves the old file or the new one.

    Raises:
      ValueError: on a number that is not finite, for which JSON has no word.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(json.dumps(content, indent=indent, allow_nan=False) + "\n")
    beside.replace(path)


def read_json(path: Path) -> Any:
    """The content of a JSON file, with or without a byte-order mark.

    Raises:
      ConfigError: naming the file and the place, if it is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: no JSON that can be read ({error}). Mend it.") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context in which no other process has this folder; made if it is missing.

    The lock is the system's and ends with the process, however that ends; the file says who has it.

    Raises:
      ConfigError: if another process has it, or the folder cannot be written.
    """
    import fcntl  # which Windows has not, where runs are read and not trained

    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise ConfigError(f"cannot write to '{folder}' ({error.strerror})") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = " ".join(file.read().split()) or "another process"
            raise ConfigError(
                f"'{folder}' is in use by {holder}: wait for it, or choose another --workdir"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


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
