"""The writer of a run's checkpoints, which are read by `checkpoints`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from cropr_jax.errors import CheckpointError
from cropr_jax.runs import checkpoints, ranking
from cropr_jax.runs.checkpoints import first_line


@dataclasses.dataclass
class _Best:
    """Orbax's policy of what to keep: the best ranked step."""

    saved: Checkpoints

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        best = self.saved.best_of(checkpoints)
        return [one.step == best for one in checkpoints]


class Checkpoints:
    """Writer and reader of one run's checkpoints.

    Use as a context manager: leaving waits for what is still being written, and a failure of the
    background writer comes out there or at the next save, never not at all.
    """

    def __init__(self, workdir: str | Path, metric: str):
        """Opens `workdir/checkpoints`, clearing what a killed run left unfinished.

        Args:
          workdir: of the run.
          metric: name of the metric by which the best step is kept, higher is better.
        """
        keep, decide = ocp.training.preservation_policies, ocp.training.save_decision_policies
        # Typed loosely: Orbax's policies do not declare that they are the protocol they are.
        policies: dict[str, Any] = {
            "save_decision_policy": decide.FixedIntervalPolicy(1),
            "preservation_policy": keep.AnyPreservationPolicy([keep.LatestN(1), _Best(self)]),
        }
        self.workdir = Path(workdir).absolute()
        self.root = self.workdir / checkpoints.DIRECTORY
        self.metric = metric
        self._pending = None
        self._ranking = ranking.read(self.workdir)
        try:
            self._steps = ocp.training.Checkpointer(
                str(self.root), cleanup_tmp_directories=True, **policies
            )
        except OSError as error:
            raise CheckpointError(
                f"cannot write checkpoints to '{self.root}' ({first_line(error)}): choose another "
                "--workdir"
            ) from error

    @property
    def last(self) -> int | None:
        """Last complete step, None if there is none."""
        latest = self._steps.latest
        return None if latest is None else latest.step

    @property
    def best(self) -> tuple[int, dict[str, float]] | None:
        """Step and metrics of the best evaluated step still on disk."""
        steps = checkpoints.with_metrics(self._steps.checkpoints, self._ranking)
        found = ranking.best(steps, self.metric, steps)
        return None if found is None else (found, dict(steps[found]))

    def best_of(self, listed: Sequence[Any]) -> int | None:
        """The best evaluated step of some checkpoints of Orbax; None if none was evaluated."""
        steps = checkpoints.with_metrics(listed, self._ranking)
        return ranking.best(steps, self.metric, steps)

    def evaluated(self, step: int) -> bool:
        """Whether a step was evaluated, be it ranked or not."""
        return step in self._ranking

    def path(self, step: int) -> Path:
        """Directory of a step."""
        return self.root / str(step)

    def save(self, step: int, state: Any) -> None:
        """Starts writing a step and returns when the arrays have left the devices.

        A step that is already on disk is left as it is.

        Args:
          step: steps taken.
          state: the state after them; may be donated once this returns.

        Raises:
          CheckpointError: if this or the previous save failed.
        """
        self.wait()
        if self.last == step:
            return
        try:
            self._pending = self._steps.save_async(step, checkpoints.state_dict(state), force=True)
        except OSError as error:
            raise CheckpointError(
                f"writing step {step} to '{self.root}' failed ({first_line(error)})"
            ) from error

    def rank(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes down how a saved step was evaluated; the best one before it goes if it is better.

        Args:
          step: that was saved.
          metrics: of its evaluation; none if it is not to be ranked.

        Raises:
          CheckpointError: if they cannot be written.
        """
        self.wait()  # so that what is ranked is on disk
        before = self.best
        self._ranking[step] = dict(metrics)
        try:
            if jax.process_index() == 0:
                ranking.write(self.workdir, self._ranking)
        except OSError as error:
            raise CheckpointError(
                f"writing to '{self.workdir}' failed ({first_line(error)})"
            ) from error
        after = self.best
        if before is not None and after is not None and before[0] != after[0]:
            if before[0] != self.last:
                self._steps.delete(before[0], missing_ok=True)

    def wait(self) -> None:
        """Waits for the writer.

        Raises:
          CheckpointError: if it failed.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except Exception as error:
            raise CheckpointError(
                f"writing a checkpoint to '{self.root}' failed ({first_line(error)})"
            ) from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self.wait()
        except CheckpointError:
            self._close(quiet=True)
            raise
        self._close(quiet=error is not None)

    def _close(self, *, quiet: bool) -> None:
        """Closes Orbax, which fails again after a failed save: `quiet` says that one is told."""
        try:
            self._steps.close()
        except Exception as error:
            if not quiet:
                raise CheckpointError(
                    f"writing a checkpoint to '{self.root}' failed ({first_line(error)})"
                ) from error
