"""The loop: one for all tasks. `train(config, workdir)` and `evaluate(config, workdir)`."""

from __future__ import annotations

import collections
import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from cropr_jax.core.schedule import Schedule
from cropr_jax.data import pipeline
from cropr_jax.errors import ConfigError, WorkerError
from cropr_jax.host.files import locked, write_json
from cropr_jax.host.version import revision, versions
from cropr_jax.runs import checkpoints, directory
from cropr_jax.runs.writer import Checkpoints
from cropr_jax.train import fields, initial, recipe
from cropr_jax.train.card import card
from cropr_jax.train.logging import Logger, say
from cropr_jax.train.processes import (
    Interrupted,
    Preemption,
    initialize_processes,
    wait_for_all,
)
from cropr_jax.train.recipe import Recipe
from cropr_jax.train.results import draw, finish
from cropr_jax.train.run import IN_FLIGHT, Evaluation, Run, prefetch
from cropr_jax.train.state import TrainState, evaluation_params


def _claim(workdir: Path, resolved: Recipe) -> None:
    """Makes the work directory this config's, or checks that it is."""
    path = workdir / directory.CONFIG
    if path.exists():
        fields.check_same(resolved.config, directory.config(workdir), workdir)
    if jax.process_index() > 0:
        return
    known = directory.class_names(workdir)
    if known and known != tuple(resolved.class_names):
        raise ConfigError(
            f"config.data: the run in '{workdir}' has other classes ({len(known)}, first "
            f"{known[0]!r}) than the data now ({len(resolved.class_names)}, first "
            f"{next(iter(resolved.class_names), '')!r}): choose another --workdir, or give the "
            "classes the names that they had"
        )
    about = {
        "class_names": resolved.class_names,
        "metric": resolved.task.metric.name,
        "versions": versions(),
        "revision": revision(),
    }
    try:
        write_json(path, resolved.config)
        write_json(workdir / directory.ABOUT, about)
    except OSError as error:
        raise ConfigError(f"--workdir: cannot write to '{workdir}' ({error.strerror})") from error


def _prepare(config: Any, workdir: Path) -> Recipe:
    if config.get("distributed") and not jax.distributed.is_initialized():
        initialize_processes()
    resolved = recipe.resolve(config, class_names=directory.class_names(workdir))
    say(card(resolved))
    return resolved


def _check_finite(step: int, metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the {name.replace('_', ' ')} is {value} at step {step}: nothing is saved after "
                "it; lower config.optimizer.lr, or set config.optimizer.clip_norm"
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
      KeyboardInterrupt: if Ctrl-C ended it early, after its state was saved.
      ConfigError: before anything is compiled, on what the user has to mend.
      FloatingPointError: if loss, gradients or parameters are not finite.
    """
    workdir = Path(workdir).expanduser().absolute()
    resolved = _prepare(config, workdir)
    with contextlib.ExitStack() as held:
        if jax.process_index() == 0:
            held.enter_context(locked(workdir))
        return _train(resolved, workdir)


def _train(resolved: Recipe, workdir: Path) -> dict[str, Any] | None:
    """The run, in a directory that no other one has."""
    # Orbax makes its readers meet, so all processes must look before one of them makes anything.
    started = checkpoints.started(workdir)
    wait_for_all("looked for checkpoints")
    if not started:  # what a checkpoint has is not read again
        for field in ("init", "teacher"):
            initial.check_path(resolved.config[field], f"config.{field}")
    _claim(workdir, resolved)
    run = Run(resolved)
    with (
        Preemption() as preemption,
        Checkpoints(workdir, resolved.task.metric.name) as saved,
    ):
        try:
            state, found = _steps(run, saved, preemption, workdir)
            if found is None:  # it was finished before
                found = run.evaluate(evaluation_params(state), resolved.model.schedule)
        except (Interrupted, WorkerError) as error:
            if isinstance(error, WorkerError) and not preemption.asked:
                raise  # a worker that was killed for another reason
            saved.wait()
            kept = f"saved step {saved.last or 0} of {resolved.total_steps}"
            say(f"{preemption.asked or 'SIGTERM'}: {kept}; the same command resumes")
            preemption.leave()
            return None
        saved.wait()
        best = saved.best
    more: dict[str, Any] = {"step": resolved.total_steps}
    if best is not None:
        more["best"] = {"step": best[0], **best[1]}
    result = finish(workdir / "result.json", resolved, found, **more)
    draw(workdir, resolved, evaluation_params(state))
    return result


class _Pending:
    """Metrics of the steps that are under way on the device."""

    def __init__(self, logger: Logger):
        self._logger = logger
        self._steps: collections.deque[tuple[int, Any]] = collections.deque()

    def add(self, step: int, metrics: Any) -> None:
        self._steps.append((step, metrics))

    def collect(self, leave: int) -> None:
        """Waits for the metrics of all but the last `leave` steps, and passes them to the log."""
        while len(self._steps) > leave:
            step, pending = self._steps.popleft()
            metrics = {name: float(x) for name, x in jax.device_get(pending).items()}
            _check_finite(step, metrics)
            self._logger.train(step, metrics)


def _first(run: Run, saved: Checkpoints) -> tuple[TrainState, int]:
    """The state that a start of the run begins with, and how many steps it has taken."""
    start = saved.last
    if start is None:
        return run.initial_state(), 0
    state = run.restore(saved.path(start))
    say(f"Resumes after step {start} from {saved.path(start)}")
    return state, start


def _steps(
    run: Run, saved: Checkpoints, preemption: Preemption, workdir: Path
) -> tuple[TrainState, Evaluation | None]:
    """All steps that are left, and the evaluation of the last one if it was made now.

    The host runs ahead of the device by `IN_FLIGHT` steps and reads the metrics of a step only
    when a later one is already under way. Where the curriculum has another schedule the step is
    compiled anew; rates only grow, so none comes twice. A step is saved before it is evaluated, and
    one whose evaluation was cut off is evaluated first of all.

    Raises:
      Interrupted: if the run was asked to stop; its state is saved.
    """
    config, total, curriculum = run.recipe.config, run.recipe.total_steps, run.recipe.curriculum
    state, start = _first(run, saved)
    compiled, pruning, found = None, None, None
    owed = _due(start, run.recipe.eval_every, total) and start > 0 and not saved.evaluated(start)
    with Logger(workdir, start, total, config["batch_size"], config["log_every"], owed) as logger:
        pending = _Pending(logger)
        if owed:
            found = _evaluate(run, state, start, saved, preemption, logger)
        if start == total:
            return state, found
        batches = prefetch(_batches(run.recipe, start), run.recipe.mesh)
        for step in range(start + 1, total + 1):
            try:
                batch = next(batches)
            except ConfigError:  # an example that cannot be read: no step before it is lost
                pending.collect(0)
                if step - 1 > start:
                    saved.save(step - 1, state)
                raise
            if compiled is None or pruning != curriculum.at(step - 1):
                pruning = curriculum.at(step - 1)
                with logger.pause():
                    compiled = _compile(run, pruning, batch, step)
            state, metrics = compiled(state, batch)
            pending.add(step, metrics)
            pending.collect(IN_FLIGHT)
            stop = preemption.at(step)
            evaluate = _due(step, run.recipe.eval_every, total)
            if not (stop or evaluate or _due(step, config["checkpoint_every"], total)):
                continue
            pending.collect(0)
            with logger.pause():
                saved.save(step, state)
                if stop:
                    raise Interrupted
                found = None
                if evaluate:
                    found = _evaluate(run, state, step, saved, preemption, logger)
    return state, found


def _evaluate(
    run: Run,
    state: TrainState,
    step: int,
    saved: Checkpoints,
    preemption: Preemption,
    logger: Logger,
) -> Evaluation:
    """Evaluates a saved step, and writes down what was found."""
    final, used = run.recipe.model.schedule, run.recipe.curriculum.at(step - 1)
    # The result is that of the model, also where its curriculum fills the whole run.
    used = final if step == run.recipe.total_steps else used
    found = run.evaluate(evaluation_params(state), used, preemption.check)
    for split, values in found.metrics.items():
        _check_finite(step, {f"{name} on '{split}'": value for name, value in values.items()})
    _log(logger, step, found)
    # What was measured with fewer tokens pruned is no measure for the best.
    saved.rank(step, found.first if used == final else {})
    return found


def _batches(resolved: Recipe, start: int) -> Iterator[Any]:
    """This host's rows of the training batches from step `start` on, to the end of the run."""
    return pipeline.train_batches(
        resolved.config,
        resolved.examples(),
        start,
        jax.process_index(),
        jax.process_count(),
        stop_step=resolved.total_steps,
    )


def _compile(run: Run, pruning: Schedule, batch: Mapping[str, Any], step: int) -> Any:
    began = time.monotonic()
    compiled = run.compile_train(pruning, batch)
    left = pruning.patches(run.recipe.model.patches)
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
    workdir = Path(workdir).expanduser().absolute()
    resolved = _prepare(config, workdir)
    run = Run(resolved)
    path = checkpoints.find(workdir, resolved.task.metric.name)
    say(f"Evaluates {path}")
    found = run.evaluate(run.restore_params(path), resolved.model.schedule)
    return finish(workdir / "eval.json", resolved, found, step=int(path.name))
