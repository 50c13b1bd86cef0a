"""A config of the third task: four blocks on made-up scenes, for `run.py`, `bench`, `compare`."""

import depth  # registers the task
from ml_collections import ConfigDict

from configs import arguments, base, methods
from cropr_jax.core.fusion import DENSE_FUSIONS


def get_config(arg=None):
    arg = arguments.parse_arg(arg, fusions=DENSE_FUSIONS)
    config = base.make(arg)
    del config.mixup
    config.task = f"depth:{depth.Depth.name}"
    config.total_epochs, config.batch_size, config.eval_batch_size = 2.0, 16, 16
    config.log_every, config.checkpoint_every, config.eval_every = 2, 3, 1.0
    data = {"source": "scenes", "env": "", "train": "train[:64]", "eval": {"test": "test[64:85]"}}
    config.data.update(data | {"num_examples": 85, "image_size": (16, 16)})
    half = (0.5, 0.5, 0.5)
    config.preprocess = ConfigDict({"res": (16, 16), "mean": half, "std": half, "train": {}})
    config.optimizer.lr = 0.05
    config.model = ConfigDict(
        {
            "width": 16,
            "depth": 4,
            "heads": 2,
            "patch": 4,
            "head": depth.Depth.name,
            "image_size": (16, 16),
            "num_classes": 1,
            "reduction": methods.reduction(arg, 3, 16),
        }
    )
    return base.finish(config, arg)
