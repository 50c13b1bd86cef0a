"""The loop: one for all tasks. `train(config, workdir)` and `evaluate(config, workdir)`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import platform
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from cropr_jax import models
from cropr_jax.data import pipeline
from cropr_jax.data.preprocess import decode
from cropr_jax.data.sources import open_source
from cropr_jax.errors import ConfigError
from cropr_jax.explain import explain
from cropr_jax.inference import predictor
from cropr_jax.models.segmenter import Segmenter
from cropr_jax.reducers import Pruner, registry
from cropr_jax.schedule import Schedule
from cropr_jax.train import checkpoints, fields, initial, optimizer, recipe, routers, sharding
from cropr_jax.train.card import card, facts
from cropr_jax.train.checkpoints import Checkpoints
from cropr_jax.train.logging import Logger, say, table
from cropr_jax.train.optimizer import TrainState
from cropr_jax.train.recipe import Recipe
from cropr_jax.train.step import INIT_KEY, Step, jit_evaluate, jit_train

PACKAGES = ("cropr_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
# Steps that may be under way on the device while the host goes on.
IN_FLIGHT = 2
# Images in the picture that a run ends with.
PICTURED = 6


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


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide numbers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def revision() -> str:
    """Git revision of the source tree, with '+' if it has local changes; '' outside of one."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "HEAD")
    return head + ("+" if head and git("status", "--porcelain", "-uno") else "")


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
        return step.lower(self.abstract, batch).compile()

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


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes beside and renames, so that a kill leaves the old file or the new one."""
    if jax.process_index() == 0:
        beside = path.with_name(path.name + ".tmp")
        beside.write_text(json.dumps(content, indent=2) + "\n")
        beside.replace(path)


def _claim(workdir: Path, resolved: Recipe) -> None:
    """Makes the work directory this config's, or checks that it is."""
    path = workdir / "config.json"
    if path.exists():
        fields.check_same(resolved.config, json.loads(path.read_text()), workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        _write_json(path, resolved.config)
        about = {
            "class_names": resolved.class_names,
            "versions": versions(),
            "revision": revision(),
        }
        _write_json(workdir / "run.json", about)
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
    for field in ("init", "teacher"):
        initial.check_path(resolved.config.get(field) or "", f"config.{field}")
    say(card(resolved))
    return resolved


def _percent(name: str, value: float | int | None) -> str:
    """A metric in words: fractions as per cent."""
    if value is None:
        return f"{name} -"
    return f"{name} {value:.6g}" if name in ("loss", "examples") else f"{name} {value:.2%}"


def _words(metrics: Mapping[str, float | int | None]) -> str:
    return ", ".join(_percent(name, value) for name, value in metrics.items())


def _finish(path: Path, resolved: Recipe, found: Evaluation, **more: Any) -> dict[str, Any]:
    """Prints the result table, and that of the classes, and writes all to `path`."""
    result = {
        "metrics": found.metrics,
        **({"per_class": found.per_class} if found.per_class else {}),
        **more,
        **facts(resolved),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "config": resolved.config,
        "versions": versions(),
        "revision": revision(),
    }
    _write_json(path, result)
    for split, classes in found.per_class.items():
        say(table([(name, _words(row)) for name, row in classes.items()], f"Classes of '{split}'"))
    rows = [(split, _words(values)) for split, values in found.metrics.items()]
    rows += [
        ("total pruning ratio", f"{result['tpr']:.1%}"),
        ("parameters", f"{result['params']:,} in training, {result['params_slim']:,} slim"),
        ("written", str(path)),
    ]
    say(table(rows, "Result"))
    return result


def _draw(workdir: Path, run: Run, params: dict[str, Any]) -> None:
    """Writes `pruning.png`: a few test images, and the block after which each patch was pruned.

    Of segmentation it is `segmentation.png`, with truth and prediction, and drawn of every model;
    of classification it is left out where nothing is pruned, or merged. With several processes,
    where none holds all parameters, `python -m cropr_jax.explain` draws it from the checkpoint.
    """
    resolved = run.recipe
    model = resolved.model
    prunes = model.schedule.removed > 0 and issubclass(registry.method(model.reduction), Pruner)
    dense = isinstance(model, Segmenter)
    if not (prunes or dense) or jax.process_count() > 1:
        return
    name, split = next(iter(resolved.config["data"]["eval"].items()))
    source = open_source(resolved.config["data"], split)
    # Spread over the split, which is often sorted by class.
    chosen = np.linspace(0, len(source) - 1, min(PICTURED, len(source))).astype(int)
    records = [source[i] for i in dict.fromkeys(chosen.tolist())]
    host = jax.device_get(params)
    made = predictor(model, host, resolved.config["preprocess"], resolved.class_names)
    images = [decode(record["image"]) for record in records]
    labels = [record["label"] for record in records]
    path = workdir / ("segmentation.png" if dense else "pruning.png")
    explain(made, images, path, labels)
    say(f"Drew {len(images)} images of '{name}' to {path}")


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
        _draw(workdir, run, optimizer.evaluation_params(state))
        return _finish(workdir / "result.json", resolved, found, **more)


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
    return _finish(workdir / "eval.json", resolved, found, step=int(path.name))
