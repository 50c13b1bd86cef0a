"""What differs by task, an object for each; `base` says what a task is."""

from cropr_jax.tasks.base import Evaluator, Metric, Result, Task
from cropr_jax.tasks.registry import TASKS, create, get, register

__all__ = ["TASKS", "Evaluator", "Metric", "Result", "Task", "create", "get", "register"]
