"""A short fine-tuning recipe for CLS-trained weights on a small data set."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from configs import arguments, base, methods


def make(
    config: ConfigDict,
    arg: ConfigDict,
    *,
    data: Mapping[str, Any],
    spec: Any,
    rate: int,
    res: int,
    num_classes: int,
) -> ConfigDict:
    """The recipe.

    Args:
      config: from `base.make`.
      arg: parsed arguments, with `norm`.
      data: source, name and environment variable.
      spec: sizes of the backbone, `cropr_jax.models.VARIANTS`.
      rate: R of the per-block schedule.
      res: image size.
      num_classes: 0 to count them in the data.
    """
    config.total_epochs = 2.0
    config.cpu_devices = 2
    config.batch_size = 64
    config.eval_batch_size = 100
    config.log_every = 20
    config.checkpoint_every = 200
    config.data.update(dict(data))
    config.preprocess.update(
        {
            "res": (res, res),
            **arguments.pick("norm", arg.norm, base.NORMALIZATIONS),
            "crop_ratio": 1.0,
        }
    )
    config.preprocess.train.update({"crop_scale": (0.5, 1.0)})
    config.mixup.label_smoothing = 0.1
    config.optimizer.update({"lr": 2e-3, "warmup_epochs": 0.2, "layer_decay": 0.75})
    config.model = ConfigDict(
        {
            "name": "vit",
            "variant": arg.variant.removeprefix("vit_"),
            "depth": spec.depth,
            "image_size": (res, res),
            "num_classes": num_classes,
            "pool": "cls",
            "drop_path": 0.0,
            "drop_path_last_block": 0.0,
            "dtype": "float32",
            "reduction": methods.reduction(arg, rate, (res // spec.patch) ** 2),
        }
    )
    return base.finish(config, arg)
