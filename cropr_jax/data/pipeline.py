"""Batches from sources, with Grain: pure functions of (seed, step), on any number of hosts.

One epoch is a full permutation of the examples, another one each epoch, cut into whole batches; the
rest is dropped, as the released loader does (benbergner/cropr `cls/main.py`, drop_last). Example
`row` of global batch `step` depends on (seed, step, row) alone, and host h of H gets the rows
h B/H to (h + 1) B/H. So a run resumes at any step without replaying, and the global batch is the
same on one host and on many, with and without workers.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import grain
import numpy as np
from absl import flags

from cropr_jax.data import classification, segmentation
from cropr_jax.data.preprocess import Record
from cropr_jax.data.sources import Source, open_source
from cropr_jax.errors import ConfigError

Batch = dict[str, np.ndarray]

# By `config.task`: modules with `check(source)`, `train_transform(preprocess)`,
# `eval_transform(preprocess, source)` and `padding(preprocess, source)`.
TASKS: dict[str, ModuleType] = {"classification": classification, "segmentation": segmentation}

# Images a worker makes at a time: few enough that buffers stay small (19 MB at 224 px), many enough
# that handing them over costs little.
_PART = 32
_ENDLESS = 2**40
# Each thread holds up to three parts; Python's lock keeps more from being of use.
_MAX_THREADS = 16


def check_preprocess(config: Mapping[str, Any]) -> None:
    """Reads every field of `config.preprocess`, and no image.

    Raises:
      ConfigError: a field that cannot be read.
    """
    _task(config).train_transform(config["preprocess"])


def num_examples(config: Mapping[str, Any], name: str = "") -> int:
    """Examples in the training split, or in the evaluation split called `name` in the config."""
    return len(_open(config, name))


def class_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the classes of the training split, by label."""
    return _open(config).class_names


def steps_per_epoch(config: Mapping[str, Any]) -> int:
    """Whole batches in one epoch.

    Raises:
      ConfigError: the batch is larger than the training split.
    """
    return _steps(num_examples(config), config)


def train_batches(
    config: Mapping[str, Any],
    start_step: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    stop_step: int | None = None,
) -> Iterator[Batch]:
    """Training batches from `start_step` on, this host's rows of each.

    Args:
      config: `task`, `data`, `preprocess`, `batch_size`, `seed`.
      start_step: number of the first batch; nothing before it is read.
      process_index, process_count: this host among how many.
      stop_step: number of the first batch that is no longer made; None for endless. A run that
        knows its end should say so: workers that are stopped before leave shared memory behind,
        which Python then removes with a warning.

    Returns:
      An iterator of {'image' float32 [b, h, w, 3], 'label' int32 [b], 'id' int32 [b]}, with
      b = batch_size / process_count; `id` is the index of the example in its split. Of
      segmentation 'label' is uint8 [b, h, w], 255 where no class counts. `close()` stops the
      workers.

    Raises:
      ConfigError: a missing data set, or a batch that does not fit hosts or data. At the call,
        not at the first batch.
    """
    source = _open(config)
    rows = _host_rows(config, "batch_size", process_index, process_count)
    steps = _steps(len(source), config)
    examples = (
        grain.MapDataset.source(source)
        .seed(config["seed"])
        .shuffle()
        .repeat()
        .random_map(_TrainExample(_task(config).train_transform(config["preprocess"])))
    )
    load = _TrainPart(examples, len(source), steps, config["batch_size"], rows, _part(len(rows)))
    parts = len(rows) // load.size
    stop = _ENDLESS if stop_step is None else stop_step
    dataset = grain.MapDataset.range(start_step * parts, stop * parts).map(load)
    return _batches(dataset, parts, config["data"]["workers"])


def eval_batches(
    config: Mapping[str, Any], name: str, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
    """All examples of one evaluation split once, in order, in batches of one size.

    Args:
      config: `task`, `data`, `preprocess`, `eval_batch_size`.
      name: key of `config.data.eval`.
      process_index, process_count: this host among how many; all get the same number of batches.

    Returns:
      An iterator of batches as in `train_batches`, with b = eval_batch_size / process_count, and
      'mask' float32 [b]: 1 for examples, 0 for the padding (image 0, label 0, id -1). Of
      segmentation 'label' is the annotation in full, uint8 [b, H, W] with the largest sides of the
      split, filled with 255; 'size' int32 [b, 2] the (h, w) of it that is annotation; 'image' is
      [b, n, h, w, 3], with 'corner' int32 [b, n, 2] and 'resized' int32 [b, 2], see
      `cropr_jax.data.segmentation.Windows`.

    Raises:
      ConfigError: see `train_batches`.
    """
    source = _open(config, name)
    size = config["eval_batch_size"]
    rows = _host_rows(config, "eval_batch_size", process_index, process_count)
    task, settings = _task(config), config["preprocess"]
    transform, padding = task.eval_transform(settings, source), task.padding(settings, source)
    # Of several windows an example is as large as so many images.
    part = _part(len(rows), len(padding["image"]) if padding["image"].ndim > 3 else 1)
    load = _EvalPart(source, transform, padding, size, rows, part)
    parts = len(rows) // load.size
    dataset = grain.MapDataset.range(math.ceil(len(source) / size) * parts).map(load)
    return _batches(dataset, parts, config["data"]["workers"])


def _task(config: Mapping[str, Any]) -> ModuleType:
    name = config.get("task", "classification")
    if name not in TASKS:
        raise ConfigError(f"config.task: found {name!r}, expected one of {sorted(TASKS)}")
    return TASKS[name]


def _open(config: Mapping[str, Any], name: str = "") -> Source:
    """The training split, or the evaluation split `name`, with labels of the task's kind."""
    source = open_source(config["data"], _split(config, name))
    _task(config).check(source)
    return source


def _split(config: Mapping[str, Any], name: str) -> str:
    if not name:
        return config["data"]["train"]
    splits = dict(config["data"]["eval"])
    if name not in splits:
        raise ConfigError(
            f"config.data.eval has no {name!r}, only {', '.join(splits)}. Name one of them."
        )
    return splits[name]


def _steps(examples: int, config: Mapping[str, Any]) -> int:
    if config["batch_size"] > examples:
        raise ConfigError(
            f"config.batch_size is {config['batch_size']}, but {config['data']['train']!r} has "
            f"only {examples} examples. Choose a smaller batch."
        )
    return examples // config["batch_size"]


def _host_rows(config: Mapping[str, Any], field: str, index: int, count: int) -> range:
    """The rows of the global batch that belong to host `index`."""
    size = config[field]
    if size <= 0 or size % count:
        raise ConfigError(
            f"config.{field} is {size}, expected a positive multiple of the {count} processes."
        )
    return range(index * (size // count), (index + 1) * (size // count))


def _part(rows: int, images: int = 1) -> int:
    """The largest divisor of `rows` of at most `_PART` images, so many for each example."""
    most = max(_PART // images, 1)
    return max(size for size in range(1, min(rows, most) + 1) if rows % size == 0)


def _batches(dataset: grain.MapDataset, parts: int, workers: int) -> Iterator[Batch]:
    """Joins every `parts` elements to one batch, read ahead by worker processes or threads."""
    if workers:
        # Grain's workers are told absl's flags, which a notebook or a test never parsed.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        read = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
        options = grain.multiprocessing.MultiprocessingOptions(
            num_workers=workers, per_worker_buffer_size=2
        )
        iterator = iter(dataset.to_iter_dataset(read).mp_prefetch(options, _end_with_parent))
    else:
        threads = min(os.cpu_count() or 1, _MAX_THREADS)
        read = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
        iterator = iter(dataset.to_iter_dataset(read))

    def generate() -> Iterator[Batch]:
        try:
            while True:
                pieces = []
                for piece in iterator:
                    pieces.append(piece)
                    if len(pieces) == parts:
                        break
                if not pieces:
                    return
                yield {key: np.concatenate([p[key] for p in pieces]) for key in pieces[0]}
        finally:
            iterator.close()

    return generate()


def _end_with_parent(worker: int, workers: int) -> None:
    """Lets a worker end when its parent is killed; Grain's would hold memory for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# What runs in the workers: plain classes, so that they pickle.


@dataclass(frozen=True)
class _TrainExample:
    transform: Callable[[Record, np.random.Generator], dict[str, Any]]

    def __call__(self, record: Record, rng: np.random.Generator) -> dict[str, Any]:
        return {**self.transform(record, rng), "id": np.int32(record["id"])}


@dataclass(frozen=True)
class _TrainPart:
    """Part k of this host's rows, counted through all steps, to a stack of `size` examples."""

    examples: Any  # grain.MapDataset of dictionaries
    num_examples: int
    steps_per_epoch: int
    batch_size: int
    rows: range
    size: int

    def __call__(self, number: int) -> Batch:
        step, part = divmod(int(number), len(self.rows) // self.size)
        epoch, step = divmod(step, self.steps_per_epoch)
        # Position in the endless sequence of permutations; each starts a new one, so the rest of
        # an epoch is dropped.
        start = epoch * self.num_examples + step * self.batch_size
        start += self.rows[part * self.size]
        return _stack([self.examples[start + i] for i in range(self.size)])


@dataclass(frozen=True)
class _EvalPart:
    """Part k of this host's rows to a stack of `size` examples, padded beyond the last one."""

    source: Source
    transform: Callable[[Record], dict[str, Any]]
    padding: dict[str, Any]
    batch_size: int
    rows: range
    size: int

    def __call__(self, number: int) -> Batch:
        step, part = divmod(int(number), len(self.rows) // self.size)
        start = step * self.batch_size + self.rows[part * self.size]
        return _stack([self._example(start + i) for i in range(self.size)])

    def _example(self, index: int) -> dict[str, Any]:
        if index < len(self.source):
            record = self.source[index]
            example, number, mask = self.transform(record), record["id"], 1
        else:
            example, number, mask = self.padding, -1, 0
        return {**example, "id": np.int32(number), "mask": np.float32(mask)}


def _stack(examples: list[dict[str, Any]]) -> Batch:
    return {key: np.stack([example[key] for example in examples]) for key in examples[0]}
