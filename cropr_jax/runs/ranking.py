"""Metrics of the evaluated steps of a run, by which its checkpoints are ranked.

A step is saved before it is evaluated, so its metrics lie beside the checkpoints, in
`WORKDIR/ranking.json`: `{"440": {"top1": 0.9, ...}, ...}`. A step that was evaluated but is not to
be ranked, since fewer tokens were pruned then than the model does, has none.
"""

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path

from cropr_jax.errors import CheckpointError
from cropr_jax.host.files import write_json

FILE = "ranking.json"
Metrics = Mapping[str, float]


def read(workdir: Path) -> dict[int, Metrics]:
    """Metrics by step, of a work directory; empty if nothing was written yet.

    Raises:
      CheckpointError: if the file is damaged.
    """
    path = workdir / FILE
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
        return {int(step): dict(metrics) for step, metrics in content.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"'{path}' is damaged ({type(error).__name__}): remove it, and the last checkpoint "
            "counts as the best one until the next evaluation"
        ) from error


def write(workdir: Path, ranking: Mapping[int, Metrics]) -> None:
    """Writes the metrics of all steps; a kill leaves the file of before or the new one."""
    write_json(workdir / FILE, {str(step): dict(ranking[step]) for step in sorted(ranking)})


def best(ranking: Mapping[int, Metrics], metric: str, steps: Collection[int]) -> int | None:
    """The step of the highest metric among `steps`, the earliest of equals; None if there is none.

    Args:
      ranking: metrics by step.
      metric: that ranks, higher is better.
      steps: that may be chosen.
    """
    scored = {
        step: ranking[step][metric]
        for step in steps
        if metric in ranking.get(step, {}) and math.isfinite(ranking[step][metric])
    }
    return max(scored, key=lambda step: (scored[step], -step), default=None)
