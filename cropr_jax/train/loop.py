"""The loop: one for all tasks. `train(config, workdir)` and `evaluate(config, workdir)`."""

from __future__ import annotations

import collections
import contextlib
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
from cropr_jax.inference import Predictor
from cropr_jax.reducers import Pruner, registry
from cropr_jax.train import checkpoints, initial, optimizer, recipe, routers, sharding
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


class Run:
    """A resolved recipe with its compiled steps and the place of its state.

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
        self._evaluate = jit_evaluate(self.step, self.shardings.params)

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

    def compile_train(self) -> Any:
        """The compiled training step (its first call would compile it too, untimed)."""
        config, model = self.recipe.config, self.recipe.model
        size, place = config["batch_size"], sharding.batch_sharding(self.recipe.mesh)
        batch = {
            "image": jax.ShapeDtypeStruct((size, *model.image_size, 3), np.float32, sharding=place),
            "label": jax.ShapeDtypeStruct((size,), np.int32, sharding=place),
            "id": jax.ShapeDtypeStruct((size,), np.int32, sharding=place),
        }
        lowered = jit_train(self.step, self.shardings).lower(self.abstract, batch)
        return lowered.compile()

    def evaluate(self, params: dict[str, Any]) -> dict[str, dict[str, float]]:
        """Metrics of every evaluation split, over all its examples."""
        results = {}
        for name in self.recipe.config["data"]["eval"]:
            batches = pipeline.eval_batches(
                self.recipe.config, name, jax.process_index(), jax.process_count()
            )
            pending: collections.deque[Any] = collections.deque()
            sums = []
            for batch in prefetch(batches, self.recipe.mesh):
                pending.append(self._evaluate(params, batch))
                if len(pending) > IN_FLIGHT:
                    sums.append(jax.device_get(pending.popleft()))
            sums.extend(jax.device_get(list(pending)))
            results[name] = self.recipe.task.summarize(sums)
            if results[name]["examples"] != self.recipe.eval_examples[name]:
                raise RuntimeError(
                    f"evaluation of '{name}' counted {results[name]['examples']} of "
                    f"{self.recipe.eval_examples[name]} examples"
                )
        return results


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
        recipe.check_same(resolved.config, json.loads(path.read_text()), workdir)
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
    say(recipe.card(resolved))
    return resolved


def _finish(
    path: Path, resolved: Recipe, metrics: Mapping[str, Mapping[str, float]], **more: Any
) -> dict[str, Any]:
    """Prints the result table and writes it to `path`."""
    result = {
        "metrics": metrics,
        **more,
        **recipe.facts(resolved),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "config": resolved.config,
        "versions": versions(),
        "revision": revision(),
    }
    _write_json(path, result)
    rows = []
    for split, values in metrics.items():
        shown = (
            f"{k} {v:.2%}" if k.startswith("top") else f"{k} {v:.6g}" for k, v in values.items()
        )
        rows.append((split, ", ".join(shown)))
    rows += [
        ("total pruning ratio", f"{result['tpr']:.1%}"),
        ("parameters", f"{result['params']:,} in training, {result['params_slim']:,} slim"),
        ("written", str(path)),
    ]
    say(table(rows, "Result"))
    return result


def _draw(workdir: Path, run: Run, params: dict[str, Any]) -> None:
    """Writes `pruning.png`: a few test images, and the block after which each patch was pruned.

    Left out for models that prune nothing or merge, and with several processes, where none holds
    all parameters (`python -m cropr_jax.explain` draws it from the checkpoint).
    """
    resolved = run.recipe
    model = resolved.model
    prunes = model.schedule.removed and issubclass(registry.method(model.reduction), Pruner)
    if not prunes or jax.process_count() > 1:
        return
    name, split = next(iter(resolved.config["data"]["eval"].items()))
    source = open_source(resolved.config["data"], split)
    # Spread over the split, which is often sorted by class.
    chosen = np.linspace(0, len(source) - 1, min(PICTURED, len(source))).astype(int)
    records = [source[i] for i in dict.fromkeys(chosen.tolist())]
    host = jax.device_get(params)
    predictor = Predictor.from_model(
        model, host, resolved.config["preprocess"], resolved.class_names
    )
    images = [decode(record["image"]) for record in records]
    labels = [record["label"] for record in records]
    explain(predictor, images, workdir / "pruning.png", labels)
    say(f"Drew {len(images)} images of '{name}' to {workdir / 'pruning.png'}")


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
        metrics = None
        if start < resolved.total_steps:
            state, metrics = _steps(run, state, start, saved, preemption, workdir)
            if state is None:
                return None
        if metrics is None:
            metrics = run.evaluate(optimizer.evaluation_params(state))
        saved.wait()
        best = saved.best
        more: dict[str, Any] = {"step": resolved.total_steps}
        if best is not None:
            more["best"] = {"step": best[0], **best[1]}
        _draw(workdir, run, optimizer.evaluation_params(state))
        return _finish(workdir / "result.json", resolved, metrics, **more)


def _steps(
    run: Run,
    state: TrainState,
    start: int,
    saved: Checkpoints,
    preemption: Preemption,
    workdir: Path,
) -> tuple[TrainState | None, dict[str, dict[str, float]] | None]:
    """Steps `start` to the last one; state None if the run was asked to stop.

    The host runs ahead of the device by `IN_FLIGHT` steps and reads the metrics of a step only
    when a later one is already under way.
    """
    config, total = run.recipe.config, run.recipe.total_steps
    began = time.monotonic()
    compiled = run.compile_train()
    say(f"Compiled the training step in {time.monotonic() - began:.1f} s")
    source: Iterator[Any] = pipeline.train_batches(
        config, start, jax.process_index(), jax.process_count(), stop_step=total
    )
    batches = prefetch(source, run.recipe.mesh)
    in_flight: collections.deque[tuple[int, Any]] = collections.deque()
    results = None
    with Logger(workdir, start, total, config["batch_size"], config["log_every"]) as logger:

        def collect(leave: int) -> None:
            while len(in_flight) > leave:
                step, pending = in_flight.popleft()
                metrics = {name: float(x) for name, x in jax.device_get(pending).items()}
                _check_finite(step, metrics)
                logger.train(step, metrics)

        for step in range(start + 1, total + 1):
            state, metrics = compiled(state, next(batches))
            in_flight.append((step, metrics))
            collect(IN_FLIGHT)
            stop = preemption.at(step)
            evaluate = _due(step, run.recipe.eval_every, total)
            if not (stop or evaluate or _due(step, config["checkpoint_every"], total)):
                continue
            collect(0)
            with logger.pause():
                results = None
                if evaluate and not stop:
                    results = run.evaluate(optimizer.evaluation_params(state))
                for split, values in (results or {}).items():
                    logger.write(step, split, values)
                    say(
                        f"step {step}: {split} "
                        + ", ".join(f"{k} {v:.4f}" for k, v in values.items() if k != "examples")
                    )
                first = next(iter(results.values())) if results else None
                saved.save(step, state, first)
            if stop and step < total:
                saved.wait()
                say(f"SIGTERM: saved step {step} of {total}; the same command resumes")
                return None, None
    return state, results


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
    metrics = run.evaluate(run.restore_params(path))
    return _finish(workdir / "eval.json", resolved, metrics, step=int(path.name))
