"""The loop: one for all tasks. `train(config, workdir)` and `evaluate(config, workdir)`."""

from __future__ import annotations

import collections
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from cropr_jax.core.schedule import Schedule
from cropr_jax.data import pipeline
from cropr_jax.errors import ConfigError
from cropr_jax.host.files import write_json
from cropr_jax.host.version import revision, versions
from cropr_jax.runs import checkpoints, directory
from cropr_jax.runs.checkpoints import Checkpoints
from cropr_jax.train import fields, initial, recipe
from cropr_jax.train.card import card
from cropr_jax.train.logging import Logger, say
from cropr_jax.train.processes import Preemption, initialize_processes, wait_for_all
from cropr_jax.train.recipe import Recipe
from cropr_jax.train.results import draw, finish
from cropr_jax.train.run import IN_FLIGHT, Evaluation, Run, prefetch
from cropr_jax.train.state import TrainState, evaluation_params


def _claim(workdir: Path, resolved: Recipe) -> None:
    """Makes the work directory this config's, or checks that it is."""
    path = workdir / directory.CONFIG
    if path.exists():
        fields.check_same(resolved.config, json.loads(path.read_text()), workdir)
    if jax.process_index() > 0:
        return
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
            initial.check_path(resolved.config[field], f"config.{field}")
    # Orbax makes its readers meet, so all processes must look before one of them makes anything.
    wait_for_all("looked for checkpoints")
    _claim(workdir, resolved)
    run = Run(resolved)
    with (
        Preemption() as preemption,
        Checkpoints(workdir, resolved.task.metric.name) as saved,
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
            found = run.evaluate(evaluation_params(state), resolved.model.schedule)
        saved.wait()
        best = saved.best
        more: dict[str, Any] = {"step": resolved.total_steps}
        if best is not None:
            more["best"] = {"step": best[0], **best[1]}
        draw(workdir, resolved, evaluation_params(state))
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
    config, total, curriculum = run.recipe.config, run.recipe.total_steps, run.recipe.curriculum
    batches = prefetch(_batches(run.recipe, start), run.recipe.mesh)
    in_flight: collections.deque[tuple[int, Any]] = collections.deque()
    pruning, compiled, found = curriculum.at(start), None, None
    with Logger(workdir, start, total, config["batch_size"], config["log_every"]) as logger:

        def collect(leave: int) -> None:
            while len(in_flight) > leave:
                step, pending = in_flight.popleft()
                metrics = {name: float(x) for name, x in jax.device_get(pending).items()}
                _check_finite(step, metrics)
                logger.train(step, metrics)

        for step in range(start + 1, total + 1):
            batch = next(batches)
            if compiled is None or pruning != curriculum.at(step - 1):
                pruning = curriculum.at(step - 1)
                with logger.pause():
                    compiled = _compile(run, pruning, batch, step)
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
                used = final if step == total else pruning
                if evaluate and not stop:
                    found = run.evaluate(evaluation_params(state), used)
                    _log(logger, step, found)
                # What was measured with fewer tokens pruned is no measure for the best.
                ranked = found if used == final else None
                saved.save(step, state, ranked.first if ranked else None)
            if stop and step < total:
                saved.wait()
                say(f"SIGTERM: saved step {step} of {total}; the same command resumes")
                return None, None
    return state, found


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
    workdir = Path(workdir).absolute()
    resolved = _prepare(config)
    run = Run(resolved)
    path = checkpoints.find(workdir, resolved.task.metric.name)
    say(f"Evaluates {path}")
    found = run.evaluate(run.restore_params(path), resolved.model.schedule)
    return finish(workdir / "eval.json", resolved, found, step=int(path.name))
