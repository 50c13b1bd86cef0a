"""Batches from sources, with Grain: pure functions of (seed, step), on any number of hosts.

One epoch is a full permutation of the examples, another one each epoch, cut into whole batches; the
rest is dropped, as the released loader does (benbergner/cropr `cls/main.py`, drop_last). Example
`row` of global batch `step` depends on (seed, step, row) alone, and host h of H gets the rows
h B/H to (h + 1) B/H. So a run resumes at any step without replaying, and the global batch is the
same on one host and on many, with and without workers.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
from absl import flags

from cropr_jax.data.records import Example, Examples, Record, Source
from cropr_jax.errors import ConfigError, WorkerError

Batch = dict[str, np.ndarray]

# What a worker makes at a time: enough that handing it over costs little, and so little that what
# waits in and behind a worker, up to five parts, stays below `_WAITING` bytes.
_PART_EXAMPLES = 32
_PART_BYTES = 64 * 2**20
_WAITING = 512 * 2**20
_ENDLESS = 2**40
# Python's lock keeps more threads from being of use. Each holds up to three parts.
_MAX_THREADS = 16
_PARTS_PER_THREAD = 3


def steps_per_epoch(examples: int, config: Mapping[str, Any]) -> int:
    """Whole batches in one epoch.

    Raises:
      ConfigError: the batch is larger than the training split.
    """
    if config["batch_size"] > examples:
        raise ConfigError(
            f"config.batch_size: {config['batch_size']}, but the split "
            f"'{config['data']['train']}' has {examples} examples: choose a smaller batch"
        )
    return examples // config["batch_size"]


def train_batches(
    config: Mapping[str, Any],
    examples: Examples,
    start_step: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    stop_step: int | None = None,
) -> Iterator[Batch]:
    """Training batches from `start_step` on, this host's rows of each.

    Args:
      config: `data.workers`, `batch_size`, `seed`.
      examples: of the training split.
      start_step: number of the first batch; nothing before it is read.
      process_index, process_count: this host among how many.
      stop_step: number of the first batch that is no longer made; None for endless. A run that
        knows its end should say so: workers that are stopped before leave shared memory behind,
        which Python then removes with a warning.

    Returns:
      An iterator of the arrays of examples [b, ...], with b = batch_size / process_count, and 'id'
      int32 [b], the index of the example in its split. `close()` stops the workers.

    Raises:
      ConfigError: a batch that does not fit hosts or data. At the call, not at the first batch.
    """
    rows = _host_rows(config, "batch_size", process_index, process_count)
    count = len(examples.source)
    steps = steps_per_epoch(count, config)
    endless = (
        grain.MapDataset.source(examples.source)
        .seed(config["seed"])
        .shuffle()
        .repeat()
        .random_map(_TrainExample(examples.source, examples.transform))
    )
    size = _part(len(rows), examples.bytes)
    load = _TrainPart(endless, count, steps, config["batch_size"], rows, size)
    parts = len(rows) // load.size
    stop = _ENDLESS if stop_step is None else stop_step
    dataset = grain.MapDataset.range(start_step * parts, stop * parts).map(load)
    return _batches(dataset, parts, config["data"]["workers"], size * examples.bytes)


def eval_batches(
    config: Mapping[str, Any],
    examples: Examples,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Batch]:
    """All examples of one evaluation split once, in order, in batches of one size.

    Args:
      config: `data.workers`, `eval_batch_size`.
      examples: of the split.
      process_index, process_count: this host among how many; all get the same number of batches.

    Returns:
      An iterator of batches as in `train_batches`, with b = eval_batch_size / process_count, and
      'mask' float32 [b]: 1 for examples, 0 for fillers, whose id is -1.

    Raises:
      ConfigError: see `train_batches`.
    """
    size = config["eval_batch_size"]
    rows = _host_rows(config, "eval_batch_size", process_index, process_count)
    part = _part(len(rows), examples.bytes)
    load = _EvalPart(*examples, size, rows, part)
    parts = len(rows) // load.size
    dataset = grain.MapDataset.range(math.ceil(len(examples.source) / size) * parts).map(load)
    return _batches(dataset, parts, config["data"]["workers"], part * examples.bytes)


def _host_rows(config: Mapping[str, Any], field: str, index: int, count: int) -> range:
    """The rows of the global batch that belong to host `index`."""
    size = config[field]
    if size <= 0 or size % count:
        raise ConfigError(
            f"config.{field} is {size}, expected a positive multiple of the {count} processes."
        )
    return range(index * (size // count), (index + 1) * (size // count))


def _part(rows: int, example_bytes: int) -> int:
    """The largest divisor of `rows` that is no more than a part may hold, in examples and bytes."""
    most = max(min(_PART_EXAMPLES, _PART_BYTES // max(example_bytes, 1)), 1)
    return max(size for size in range(1, min(rows, most) + 1) if rows % size == 0)


def _batches(
    dataset: grain.MapDataset, parts: int, workers: int, part_bytes: int
) -> Iterator[Batch]:
    """Joins every `parts` elements to one batch, read ahead by worker processes or threads.

    Args:
      dataset: of parts.
      parts: of a batch.
      workers: processes; 0 for threads.
      part_bytes: size of a part in memory.
    """
    if workers:
        # Grain's workers are told absl's flags, which a notebook or a test never parsed.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        read = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
        options = grain.multiprocessing.MultiprocessingOptions(
            num_workers=workers, per_worker_buffer_size=2
        )
        iterator = iter(dataset.to_iter_dataset(read).mp_prefetch(options, _live_with_parent))
    else:
        fitting = _WAITING // (_PARTS_PER_THREAD * max(part_bytes, 1))
        threads = max(min(os.cpu_count() or 1, _MAX_THREADS, fitting), 1)
        read = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
        iterator = iter(dataset.to_iter_dataset(read))

    def generate() -> Iterator[Batch]:
        try:
            while pieces := list(itertools.islice(iterator, parts)):
                yield {key: np.concatenate([p[key] for p in pieces]) for key in pieces[0]}
        except RuntimeError as error:
            if "Worker process was terminated" not in str(error):
                raise
            raise WorkerError(
                f"config.data.workers: a process that reads examples was killed ({error}), perhaps "
                "for want of memory: the same command resumes; set fewer workers, or 0"
            ) from error
        finally:
            iterator.close()

    return generate()


def _live_with_parent(worker: int, workers: int) -> None:
    """Lets a worker end when its parent does and not before.

    Schedulers and terminals signal all processes of a run: workers outlive that, since the run
    still needs them to take its leave. And Grain's would hold memory for ever if it were killed.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# What runs in the workers: plain classes, so that they pickle.


@dataclass(frozen=True)
class _TrainExample:
    source: Source
    transform: Callable[[Record, np.random.Generator], Example]

    def __call__(self, record: Record, rng: np.random.Generator) -> Example:
        with self.source.reading(record["id"]):
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
    transform: Callable[[Record], Example]
    filler: Example
    batch_size: int
    rows: range
    size: int

    def __call__(self, number: int) -> Batch:
        step, part = divmod(int(number), len(self.rows) // self.size)
        start = step * self.batch_size + self.rows[part * self.size]
        return _stack([self._example(start + i) for i in range(self.size)])

    def _example(self, index: int) -> Example:
        if index < len(self.source):
            record = self.source[index]
            with self.source.reading(record["id"]):
                example, number, mask = self.transform(record), record["id"], 1
        else:
            example, number, mask = self.filler, -1, 0
        return {**example, "id": np.int32(number), "mask": np.float32(mask)}


def _stack(examples: list[Example]) -> Batch:
    return {key: np.stack([example[key] for example in examples]) for key in examples[0]}
