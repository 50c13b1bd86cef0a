"""What differs by task: targets, losses, metrics.

A task is a module with `criterion(auxiliary logits, places, targets)` (see
`cropr_jax.reducers.base.Criterion`), `losses(logits, extra, targets)`,
`predicted_targets(logits, model)`, `predict(model, batch)`, what the model says of an evaluation
batch, `evaluation_sums(logits, batch)`, of that, `summarize(batches)`, and `BEST`, the metric by
which checkpoints are ranked (higher is better). Tasks whose images are not
mixed have `targets(labels, model)`, tasks with results by class `per_class(batches)`.
"""

from types import ModuleType

from cropr_jax.errors import ConfigError
from cropr_jax.tasks import classification, segmentation

TASKS: dict[str, ModuleType] = {
    "classification": classification,
    "segmentation": segmentation,
}


def get(name: str) -> ModuleType:
    """The task of that name.

    Raises:
      ConfigError: on an unknown name.
    """
    if name not in TASKS:
        raise ConfigError(f"config.task: found {name!r}, expected one of {sorted(TASKS)}")
    return TASKS[name]
