"""The predictor of a trained run: `cropr_jax.load`."""

from __future__ import annotations

from pathlib import Path

from cropr_jax import models, tasks
from cropr_jax.tasks.predictor import Predictor


def load(path: str | Path, dtype: str | None = None) -> Predictor:
    """The predictor of a trained run. Of a checkpoint, only what the slim model needs is read.

    Args:
      path: a work directory (its best checkpoint then, else its last), or the directory of one
        step, `WORKDIR/checkpoints/STEP`. `WORKDIR/config.json` says what the model is and how
        images are preprocessed.
      dtype: compute dtype, 'float32' or 'bfloat16'; by default that of the config.

    Raises:
      CheckpointError: if there is no run or no checkpoint, or it is of another model.
    """
    # Orbax is needed where a run is loaded, and not where a predictor is made of other weights.
    from cropr_jax.runs import checkpoints, directory

    workdir = directory.of_step(path)
    config = directory.config(workdir)
    task = tasks.get(config["task"])
    model = models.create(config["model"] | ({"dtype": dtype} if dtype else {}))
    step = directory.step_directory(path)
    params = checkpoints.restore_params(step, models.slim_leaves(model))
    names = directory.class_names(workdir)
    return task.predictor.from_model(model, params, config["preprocess"], names)
