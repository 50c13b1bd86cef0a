"""What a run shows and leaves behind: progress bar, TensorBoard, `metrics.jsonl`, result table."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tensorboardX import SummaryWriter
from tqdm import tqdm

from cropr_jax.host.messages import printable

METRICS = "metrics.jsonl"


def say(text: str) -> None:
    """One message on standard output, from the first process only, above the progress bar."""
    if jax.process_index() == 0:
        tqdm.write(printable(text), file=sys.stdout)
        sys.stdout.flush()


def table(rows: Sequence[tuple[str, Any]], title: str) -> str:
    """Two columns under a title."""
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join([title, *lines])


def drop_records_after(path: Path, step: int, evaluates: bool) -> None:
    """Takes out of `metrics.jsonl` what a resumed run is going to write again.

    Args:
      path: of the file.
      step: that it resumes after.
      evaluates: whether it evaluates that step first.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # a kill may have cut the last line
            continue
        again = evaluates and record["step"] == step and record["split"] != "train"
        if record["step"] <= step and not again:
            kept.append(line + "\n")
    path.write_text("".join(kept))


class Logger:
    """Scalars by step, written by the first process.

    Averages training metrics between two records, and counts images per second over the same
    stretch, evaluation and checkpoints left out.
    """

    def __init__(
        self,
        workdir: Path,
        start: int,
        total: int,
        batch_size: int,
        every: int,
        evaluates: bool = False,
    ):
        """Opens the writers.

        Args:
          workdir: of the run.
          start: steps already taken.
          total: steps of the whole run.
          batch_size: images of a step.
          every: steps between two records.
          evaluates: whether the first thing is an evaluation of step `start`.
        """
        self.first = jax.process_index() == 0
        self.every = every
        self.total = total
        self.batch_size = batch_size
        self._sums: dict[str, float] = {}
        self._steps = 0
        self._paused = 0.0
        self._since = time.monotonic()
        if not self.first:
            return
        drop_records_after(workdir / METRICS, start, evaluates)
        self._jsonl = (workdir / METRICS).open("a", buffering=1)
        self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=start + 1)
        terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            initial=start,
            unit="step",
            dynamic_ncols=terminal,
            mininterval=0.5 if terminal else 30.0,
        )

    def train(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a finished step (from 1), and writes a record when one is due."""
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._steps += 1
        if self.first:
            self._bar.update(step - self._bar.n)
        if step % self.every and step != self.total:
            return
        seconds = time.monotonic() - self._since - self._paused
        record = {name: value / self._steps for name, value in self._sums.items()}
        # The rate is that of the step, not a mean over the stretch.
        record["learning_rate"] = metrics["learning_rate"]
        record["images_per_second"] = self._steps * self.batch_size / seconds
        self._sums, self._steps, self._paused = {}, 0, 0.0
        self._since = time.monotonic()
        self.write(step, "train", record)
        if self.first:
            self._bar.set_postfix_str(
                f"loss {record['loss']:.3f}, {record['images_per_second']:.1f} images/s"
            )

    def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """One record of scalars."""
        if not self.first:
            return
        record = {"step": step, "split": split, **{k: float(v) for k, v in values.items()}}
        self._jsonl.write(json.dumps(record, allow_nan=False) + "\n")
        for name, value in values.items():
            self._board.add_scalar(f"{split}/{name}", value, step)

    def pause(self) -> Pause:
        """Context whose time does not count as training."""
        return Pause(self)

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.first:
            self._bar.close()
            self._board.close()
            self._jsonl.close()


class Pause:
    """See `Logger.pause`."""

    def __init__(self, logger: Logger):
        self._logger = logger

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._logger._paused += time.monotonic() - self._start
