"""Tasks by the name that configs use."""

import importlib
from collections.abc import Mapping
from typing import Any

from cropr_jax.errors import ConfigError
from cropr_jax.models import HEADS
from cropr_jax.tasks.base import Task
from cropr_jax.tasks.classification.task import Classification
from cropr_jax.tasks.segmentation.task import Segmentation

TASKS: dict[str, type[Task]] = {}


def register(task: type[Task]) -> None:
    """Makes a task, and its head, known by its name; a later one of that name takes its place."""
    TASKS[task.name] = task
    HEADS[task.name] = task.head


def get(name: str) -> type[Task]:
    """The task of that name.

    Args:
      name: of a registered one; or 'MODULE:NAME' of one that a module registers.

    Raises:
      ConfigError: on an unknown name.
    """
    module, _, short = name.rpartition(":")
    if module and short not in TASKS:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"config.task: {name!r} cannot be imported ({error})") from error
    if short not in TASKS:
        raise ConfigError(
            f"config.task: found {name!r}, expected one of {sorted(TASKS)}, or 'MODULE:NAME' of a "
            "task that a module registers"
        )
    return TASKS[short]


def create(config: Mapping[str, Any]) -> Task:
    """The task that a config names, as it sets it up.

    Raises:
      ConfigError: on an unknown name or a wrong field.
    """
    return get(config.get("task", "")).from_config(config)


for _task in (Classification, Segmentation):
    register(_task)
