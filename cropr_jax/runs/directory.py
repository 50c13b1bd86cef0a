"""What a work directory says of its run: config, classes, metric, best step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cropr_jax import tasks
from cropr_jax.errors import CheckpointError
from cropr_jax.host.files import read_json
from cropr_jax.runs import checkpoints

CONFIG = "config.json"
ABOUT = "run.json"


def of_step(path: str | Path) -> Path:
    """The work directory of one of its steps; any other path is one already."""
    path = Path(path).expanduser().absolute()
    return path.parent.parent if path.parent.name == checkpoints.DIRECTORY else path


def config(workdir: Path) -> dict[str, Any]:
    """The resolved config that the run was started with.

    Raises:
      ConfigError: if there is none, or it is damaged.
    """
    if not (workdir / CONFIG).exists():
        raise CheckpointError(
            f"'{workdir}' has no {CONFIG}: give a work directory of a run, or one of its steps "
            f"such as WORKDIR/{checkpoints.DIRECTORY}/1000"
        )
    found = read_json(workdir / CONFIG)
    sections = ("model", "preprocess")
    if (
        not isinstance(found, dict)
        or not isinstance(found.get("task"), str)
        or not all(isinstance(found.get(name), dict) for name in sections)
    ):
        raise CheckpointError(
            f"'{workdir / CONFIG}' is not the config of a run: copy it again; the command that "
            "began the run prints it too (--print_config)"
        )
    return found


def about(workdir: Path) -> dict[str, Any]:
    """What the run wrote down of itself: `class_names`, `metric`, `versions`, `revision`.

    Raises:
      ConfigError: if that is damaged.
    """
    path = workdir / ABOUT
    found = read_json(path) if path.exists() else {}
    names = found.get("class_names", []) if isinstance(found, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"'{path}' is not what a run writes of itself: remove it, and the next start of the "
            "run writes it again; until then classes are named by number"
        )
    return found


def class_names(workdir: Path) -> tuple[str, ...]:
    """Names by label; empty if the run wrote none."""
    return tuple(about(workdir).get("class_names", ()))


def metric(workdir: Path) -> str:
    """Name of the metric that ranks the checkpoints of the run.

    Raises:
      CheckpointError: if nothing in the directory tells it.
    """
    # Runs of before the metric was written down have that of their task.
    return about(workdir).get("metric") or tasks.get(config(workdir)["task"]).metric.name


def step_directory(path: str | Path) -> Path:
    """The best step of a work directory (the last one if none was evaluated); a step as it is.

    Raises:
      CheckpointError: if there is no complete checkpoint.
    """
    path = Path(path).expanduser().absolute()
    if not (path / checkpoints.DIRECTORY).is_dir():
        return path
    steps = checkpoints.complete(path)
    return checkpoints.find(path, metric(path) if len(steps) > 1 else None)
