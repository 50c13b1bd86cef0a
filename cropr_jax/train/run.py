"""A recipe made ready to run: its state, where that lies, and its compiled steps."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cropr_jax import models
from cropr_jax.data import pipeline
from cropr_jax.schedule import Schedule
from cropr_jax.train import checkpoints, initial, optimizer, routers, sharding
from cropr_jax.train.logging import say
from cropr_jax.train.optimizer import TrainState
from cropr_jax.train.recipe import Recipe
from cropr_jax.train.step import INIT_KEY, Step, jit_evaluate, jit_train

# Steps that may be under way on the device while the host goes on.
IN_FLIGHT = 2


def prefetch(batches: Iterable[dict[str, np.ndarray]], mesh: jax.sharding.Mesh, ahead: int = 2):
    """Batches on the devices, `ahead` of them on their way before they are asked for."""
    placed = (sharding.place(batch, mesh) for batch in batches)
    queue = collections.deque(itertools.islice(placed, ahead))
    while queue:
        yield queue.popleft()
        queue.extend(itertools.islice(placed, 1))


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Results by split.

    Attributes:
      metrics: of all examples.
      per_class: of each class by name, of tasks that have them.
    """

    metrics: dict[str, dict[str, float]]
    per_class: dict[str, dict[str, dict[str, float | None]]]

    @property
    def first(self) -> dict[str, float]:
        """Metrics of the first split, by which checkpoints are ranked."""
        return next(iter(self.metrics.values()))


class Run:
    """A resolved recipe with its steps and the place of its state.

    Attributes:
      recipe: what is run.
      step: its pure functions.
      abstract: the state's shapes, with shardings.
    """

    def __init__(self, resolved: Recipe):
        self.recipe = resolved
        self.step: Step = resolved.step()
        teacher = None
        if resolved.teacher is not None and resolved.config.get("teacher"):
            teacher = models.abstract_params(resolved.teacher)
        shapes = jax.eval_shape(self._state, models.abstract_params(resolved.model), teacher)
        self.shardings = sharding.state_shardings(shapes, resolved.mesh)
        self.abstract: TrainState = checkpoints.abstract(shapes, self.shardings)
        self._evaluations: dict[Schedule, Any] = {}

    def _state(self, params: dict[str, Any], teacher: dict[str, Any] | None) -> TrainState:
        resolved = self.recipe
        average = resolved.config["optimizer"].get("ema") is not None
        return optimizer.create_state(
            params, resolved.optimizer, resolved.trainable, average, teacher
        )

    def _fresh(self, teacher: dict[str, Any] | None) -> TrainState:
        return self._state(models.init(self.recipe.model, self.step.key(INIT_KEY)), teacher)

    def initial_state(self) -> TrainState:
        """State before the first step, made where it is to lie."""
        config, model = self.recipe.config, self.recipe.model
        rule = config.get("init_resampling") or "timm"
        teacher = None
        if self.recipe.teacher is not None and (path := config.get("teacher")):
            teacher, notes = initial.teacher_params(path, self.recipe.teacher, rule)
            say("; ".join([f"Learns from {path}", *notes]))
        path = config.get("init") or ""
        if not path:
            return jax.jit(self._fresh, out_shardings=self.shardings)(teacher)
        read = initial.router_params if routers.only(config) else initial.initial_params
        params, notes = read(path, model, self.step.key(INIT_KEY), rule)
        say("; ".join([f"Starts from {path}", *notes]))
        return jax.jit(self._state, out_shardings=self.shardings)(params, teacher)

    def restore(self, path: Path) -> TrainState:
        """The state of a step directory."""
        return checkpoints.restore(path, self.abstract)

    def restore_params(self, path: Path) -> dict[str, Any]:
        """The parameters of a step directory to evaluate with; no moments are read."""
        return checkpoints.restore_params(path, self.abstract.params)

    def compile_train(self, schedule: Schedule, batch: Mapping[str, Any]) -> Any:
        """The compiled training step (its first call would compile it too, untimed).

        Args:
          schedule: of pruning.
          batch: whose shapes are those of all.
        """
        step = jit_train(self.recipe.step(schedule), self.shardings)
        options = self.recipe.config.get("compiler_options")
        return step.lower(self.abstract, batch).compile(compiler_options=options)

    def evaluate(self, params: dict[str, Any], schedule: Schedule) -> Evaluation:
        """Results of every evaluation split, over all its examples, with a schedule of pruning."""
        task = self.recipe.task
        if schedule not in self._evaluations:
            step = self.recipe.step(schedule)
            self._evaluations[schedule] = jit_evaluate(step, self.shardings.params)
        compiled = self._evaluations[schedule]
        metrics, per_class = {}, {}
        for name in self.recipe.config["data"]["eval"]:
            batches = pipeline.eval_batches(
                self.recipe.config, name, jax.process_index(), jax.process_count()
            )
            pending: collections.deque[Any] = collections.deque()
            sums = []
            for batch in prefetch(batches, self.recipe.mesh):
                pending.append(compiled(params, batch))
                if len(pending) > IN_FLIGHT:
                    sums.append(jax.device_get(pending.popleft()))
            sums.extend(jax.device_get(list(pending)))
            metrics[name] = task.summarize(sums)
            if metrics[name]["examples"] != self.recipe.eval_examples[name]:
                raise RuntimeError(
                    f"evaluation of '{name}' counted {metrics[name]['examples']} of "
                    f"{self.recipe.eval_examples[name]} examples"
                )
            if hasattr(task, "per_class"):
                per_class[name] = dict(
                    zip(self.recipe.class_names, task.per_class(sums), strict=True)
                )
        return Evaluation(metrics, per_class)
