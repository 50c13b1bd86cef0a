"""The loop: one for all tasks. `train(config, workdir)` and `evaluate(config, workdir)`."""

from __future__ import annotations

import collections
import json
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from cropr_jax.data import pipeline
from cropr_jax.errors import ConfigError
from cropr_jax.schedule import Schedule
from cropr_jax.train import checkpoints, fields, initial, optimizer, recipe
from cropr_jax.train.card import card
from cropr_jax.train.checkpoints import Checkpoints
from cropr_jax.train.logging import Logger, say
from cropr_jax.train.optimizer import TrainState
from cropr_jax.train.recipe import Recipe
from cropr_jax.train.results import draw, finish, revision, versions, write_json
from cropr_jax.train.run import IN_FLIGHT, Evaluation, Run, prefetch


class Preemption:
    """Notices SIGTERM, so that the loop can save and leave between two steps.

    Attributes:
      asked: whether the signal came (one process).
    """

    def __init__(self):
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Preemption:
        # With several processes JAX's own service takes the signal, and they agree on a step.
        if jax.process_count() == 1:
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: Any) -> None:
        self.asked = True

    def at(self, step: int) -> bool:
        """Whether to leave after `step`; the same answer in every process."""
        if jax.process_count() == 1:
            return self.asked
        return multihost_utils.reached_preemption_sync_point(step)


def _claim(workdir: Path, resolved: Recipe) -> None:
    """Makes the work directory this config's, or checks that it is."""
    path = workdir / "config.json"
    if path.exists():
        fields.check_same(resolved.config, json.loads(path.read_text()), workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(path, resolved.config)
        about = {
            "class_names": resolved.class_names,
            "versions": versions(),
            "revision": revision(),
        }
        write_json(workdir / "run.json", about)
    except OSError as error:
        raise ConfigError(f"--workdir: cannot write to '{workdir}' ({error.strerror})") from error


def initialize_processes() -> None:
    """Joins the processes of a run; to be called before anything asks for devices.

    On SLURM and other clusters that JAX knows nothing need be set. Elsewhere three environment
    variables tell each process its place: JAX_COORDINATOR_ADDRESS (host:port of the first),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID (from 0).

    Raises:
      ConfigError: if the processes cannot be joined.
    """
    told = [os.environ.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")]
    count, index = (None if value is None else int(value) for value in told)
    try:
        jax.distributed.initialize(num_processes=count, process_id=index)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"config.distributed: cannot join the processes ({str(error).splitlines()[0]}); set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or leave it off"
        ) from error


def _prepare(config: Any) -> Recipe:
    if config.get("distributed") and not jax.distributed.is_initialized():
        initialize_processes()
    resolved = recipe.resolve(config)
    say(card(resolved))
    return resolved


def _check_finite(step: int, metrics: Mapping[str, float]) -> None:
    if not math.isfinite(metrics["loss"]):
        raise FloatingPointError(
            f"the loss is {metrics['loss']} at step {step}: nothing is saved after it; lower "
            "config.optimizer.lr, or set config.optimizer.clip_norm"
        )


def _due(step: int, every: int, total: int) -> bool:
    return step == total or (every > 0 and step % every == 0)


def train(config: Any, workdir: str | Path) -> dict[str, Any] | None:
    """Trains as a config says, from the last checkpoint in `workdir` if there is one.

    Args:
      config: an `ml_collections.ConfigDict`, or nested dictionaries of the same shape.
      workdir: for checkpoints, logs and results; made if missing.

    Returns:
      The content of `result.json`, or None if SIGTERM ended the run early (its state is saved).

    Raises:
      ConfigError: before anything is compiled, on what the user has to mend.
      FloatingPointError: if the loss is not finite.
    """
    workdir = Path(workdir).absolute()
    resolved = _prepare(config)
    if not checkpoints.started(workdir):  # what a checkpoint has is not read again
        for field in ("init", "teacher"):
            initial.check_path(resolved.config.get(field) or "", f"config.{field}")
    _claim(workdir, resolved)
    run = Run(resolved)
    with (
        Preemption() as preemption,
        Checkpoints(workdir, resolved.task.BEST) as saved,
    ):
        start = saved.last
        if start is None:
            state = run.initial_state()
            start = 0
        else:
            state = run.restore(saved.path(start))
            say(f"Resumes after step {start} from {saved.path(start)}")
        found = None
        if start < resolved.total_steps:
            state, found = _steps(run, state, start, saved, preemption, workdir)
            if state is None:
                return None
        if found is None:
            found = run.evaluate(optimizer.evaluation_params(state), resolved.model.schedule)
        saved.wait()
        best = saved.best
        more: dict[str, Any] = {"step": resolved.total_steps}
        if best is not None:
            more["best"] = {"step": best[0], **best[1]}
        draw(workdir, resolved, optimizer.evaluation_params(state))
        return finish(workdir / "result.json", resolved, found, **more)


def _steps(
    run: Run,
    state: TrainState,
    start: int,
    saved: Checkpoints,
    preemption: Preemption,
    workdir: Path,
) -> tuple[TrainState | None, Evaluation | None]:
    """Steps `start` to the last one; state None if the run was asked to stop.

    The host runs ahead of the device by `IN_FLIGHT` steps and reads the metrics of a step only
    when a later one is already under way. Where the curriculum has another schedule the step is
    compiled anew; rates only grow, so none comes twice.
    """
    config, total, pruning = run.recipe.config, run.recipe.total_steps, run.recipe.curriculum
    source: Iterator[Any] = pipeline.train_batches(
        config, start, jax.process_index(), jax.process_count(), stop_step=total
    )
    batches = prefetch(source, run.recipe.mesh)
    in_flight: collections.deque[tuple[int, Any]] = collections.deque()
    schedule, compiled, found = pruning.at(start), None, None
    with Logger(workdir, start, total, config["batch_size"], config["log_every"]) as logger:

        def collect(leave: int) -> None:
            while len(in_flight) > leave:
                step, pending = in_flight.popleft()
                metrics = {name: float(x) for name, x in jax.device_get(pending).items()}
                _check_finite(step, metrics)
                logger.train(step, metrics)

        for step in range(start + 1, total + 1):
            batch = next(batches)
            if compiled is None or schedule != pruning.at(step - 1):
                schedule = pruning.at(step - 1)
                with logger.pause():
                    compiled = _compile(run, schedule, batch, step)
            state, metrics = compiled(state, batch)
            in_flight.append((step, metrics))
            collect(IN_FLIGHT)
            stop = preemption.at(step)
            evaluate = _due(step, run.recipe.eval_every, total)
            if not (stop or evaluate or _due(step, config["checkpoint_every"], total)):
                continue
            collect(0)
            with logger.pause():
                found, final = None, run.recipe.model.schedule
                # The result is that of the model, also where its curriculum fills the whole run.
                pruned = final if step == total else schedule
                if evaluate and not stop:
                    found = run.evaluate(optimizer.evaluation_params(state), pruned)
                    _log(logger, step, found)
                # What was measured with fewer tokens pruned is no measure for the best.
                ranked = found if pruned == final else None
                saved.save(step, state, ranked.first if ranked else None)
            if stop and step < total:
                saved.wait()
                say(f"SIGTERM: saved step {step} of {total}; the same command resumes")
                return None, None
    return state, found


def _compile(run: Run, schedule: Schedule, batch: Mapping[str, Any], step: int) -> Any:
    began = time.monotonic()
    compiled = run.compile_train(schedule, batch)
    left = schedule.patches(math.prod(run.recipe.model.grid))
    words = f" of step {step} on, {left[-1]} patches left" if run.recipe.curriculum.first else ""
    say(f"Compiled the training step{words} in {time.monotonic() - began:.1f} s")
    return compiled


def _log(logger: Logger, step: int, found: Evaluation) -> None:
    for split, values in found.metrics.items():
        logger.write(step, split, values)
        words = ", ".join(f"{k} {v:.4f}" for k, v in values.items() if k != "examples")
        say(f"step {step}: {split} {words}")


def evaluate(config: Any, workdir: str | Path) -> dict[str, Any]:
    """Evaluates the best checkpoint of `workdir` (the last one if none was evaluated).

    Returns:
      The content of `eval.json`; the training run's `result.json` stays as it is.

    Raises:
      ConfigError: on a wrong config, a missing checkpoint or one of another model.
    """
    workdir = Path(workdir).absolute()
    resolved = _prepare(config)
    run = Run(resolved)
    path = checkpoints.find(workdir, "best", resolved.task.BEST)
    say(f"Evaluates {path}")
    found = run.evaluate(run.restore_params(path), resolved.model.schedule)
    return finish(workdir / "eval.json", resolved, found, step=int(path.name))
