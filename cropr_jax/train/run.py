"""A recipe made ready to run: its state, where that lies, and its compiled steps."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cropr_jax import models
from cropr_jax.core import trees
from cropr_jax.core.schedule import Schedule
from cropr_jax.data import pipeline
from cropr_jax.errors import CheckpointError, ConfigError
from cropr_jax.runs import checkpoints
from cropr_jax.tasks import Result
from cropr_jax.train import initial, routers, sharding
from cropr_jax.train.logging import say
from cropr_jax.train.recipe import Recipe
from cropr_jax.train.state import TrainState, create_state
from cropr_jax.train.step import INIT_KEY, jit_evaluate, jit_train, run_key

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
      abstract: the state's shapes, with shardings.
      shardings: of the state.
      key: of the run.
    """

    def __init__(self, resolved: Recipe):
        self.recipe = resolved
        self.key = run_key(resolved.config["seed"])
        teacher = None
        if resolved.teacher_path and (taught := resolved.training.teacher) is not None:
            teacher = models.abstract_params(taught)
        shapes = jax.eval_shape(self._state, models.abstract_params(resolved.model), teacher)
        self.shardings = sharding.state_shardings(shapes, resolved.mesh)
        self.abstract: TrainState = checkpoints.abstract(shapes, self.shardings)
        self._evaluations: dict[Schedule, Any] = {}

    def _state(self, params: dict[str, Any], teacher: dict[str, Any] | None) -> TrainState:
        step = self.recipe.training
        return create_state(params, step.optimizer, step.trainable, step.ema is not None, teacher)

    def initial_state(self) -> TrainState:
        """State before the first step, made where it is to lie."""
        config, model = self.recipe.config, self.recipe.model
        rule, key = config["init_resampling"], jax.random.fold_in(self.key, INIT_KEY)
        teacher = None
        path, taught = self.recipe.teacher_path, self.recipe.training.teacher
        if path and taught is not None:
            teacher, notes = initial.teacher_params(path, taught, rule)
            say("; ".join([f"Learns from {path}", *notes]))
        read = initial.router_params if routers.only(config) else initial.initial_params
        params, notes = read(config["init"], model, key, rule)
        if config["init"]:
            say("; ".join([f"Starts from {config['init']}", *notes]))
        return jax.jit(self._state, out_shardings=self.shardings)(params, teacher)

    def restore(self, path: Path) -> TrainState:
        """The state of a step directory.

        Raises:
          CheckpointError: if it is of another model, or not finite.
        """
        state = checkpoints.restore(path, self.abstract)
        for name, leaf in trees.flatten(checkpoints.state_dict(state)).items():
            if leaf is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
                continue
            if not all(np.isfinite(part.data).all() for part in leaf.addressable_shards):
                raise CheckpointError(
                    f"checkpoint '{path}' is of a run that diverged: '{name}' is not finite there. "
                    "Remove that directory to go on from an earlier step, or begin in another "
                    "--workdir with a lower config.optimizer.lr"
                )
        return state

    def restore_params(self, path: Path) -> dict[str, Any]:
        """The parameters of a step directory to evaluate with; no moments are read."""
        return checkpoints.restore_params(path, self.abstract.params)

    def compile_train(self, pruning: Schedule, batch: Mapping[str, Any]) -> Any:
        """The compiled training step (its first call would compile it too, untimed).

        Args:
          pruning: schedule.
          batch: whose shapes are those of all.

        Returns:
          A function of state and batch.
        """
        step = jit_train(self.recipe.step(pruning), self.shardings)
        options = self.recipe.config.get("compiler_options")
        compiled = step.lower(self.abstract, batch, self.key).compile(compiler_options=options)
        return lambda state, batch: compiled(state, batch, self.key)

    def evaluate(
        self, params: dict[str, Any], pruning: Schedule, check: Callable[[], None] = lambda: None
    ) -> Evaluation:
        """Results of every evaluation split, over all its examples.

        Args:
          params: to evaluate with.
          pruning: schedule.
          check: called at every batch, which it may leave by an exception.
        """
        if pruning not in self._evaluations:
            step = self.recipe.step(pruning)
            self._evaluations[pruning] = jit_evaluate(step, self.shardings.params)
        found = {
            name: self._evaluate(name, functools.partial(self._evaluations[pruning], params), check)
            for name in self.recipe.config["data"]["eval"]
        }
        return Evaluation(
            {name: result.metrics for name, result in found.items()},
            {name: result.per_class for name, result in found.items() if result.per_class},
        )

    def _evaluate(
        self, name: str, measure: Callable[..., Any], check: Callable[[], None]
    ) -> Result:
        """The result of one split; the host collects a batch while the device works on later ones.

        Args:
          name: of the split.
          measure: of a batch and the key of the run.
          check: see `evaluate`.
        """
        examples = self.recipe.evaluation_examples(name)
        evaluator = self.recipe.task.evaluator(examples.source)
        batches = pipeline.eval_batches(
            self.recipe.config, examples, jax.process_index(), jax.process_count()
        )
        pending: collections.deque[Any] = collections.deque()
        for batch in prefetch(batches, self.recipe.mesh):
            check()
            pending.append(measure(batch, self.key))
            if len(pending) > IN_FLIGHT:
                evaluator.add(jax.device_get(pending.popleft()))
        for outputs in pending:
            evaluator.add(jax.device_get(outputs))
        try:
            result = evaluator.result()
        except ValueError as error:
            raise ConfigError(f"config.data.eval.{name}: {error}") from error
        if result.metrics["examples"] != len(examples.source):
            raise RuntimeError(
                f"evaluation of '{name}' counted {result.metrics['examples']} of "
                f"{len(examples.source)} examples"
            )
        return result
