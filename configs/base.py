"""The fields that every config has, and what `train=routers` and `runlocal` change in them."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

from cropr_jax import tasks

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
# OpenAI's CLIP and all that descends from it, EVA-02 too.
CLIP = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
NORMALIZATIONS = {"imagenet": IMAGENET, "half": HALF, "clip": CLIP}

# `runlocal` keeps everything but the sizes: depth, data and batch shrink, and so do images that are
# larger than this unless `res` is given.
LOCAL_RES = 224
LOCAL_DEPTH = 4
LOCAL_STEPS = 2


def make(arg: Mapping[str, Any]) -> ConfigDict:
    """The fields that every config has, with values that rarely differ."""
    config = ConfigDict()
    config.task = "classification"
    config.seed = arg["seed"]
    config.total_epochs = 1.0
    config.total_steps = config_dict.placeholder(int)  # overrides the epochs
    config.batch_size = 1024
    config.accum_steps = 1
    config.eval_batch_size = 256
    config.log_every = 50
    config.eval_every = 1.0  # epochs
    config.checkpoint_every = 1000  # steps
    config.init = ""  # weights to start from
    # How they get to another grid and patch: 'timm', or 'torch', MAE's and EVA's own way.
    config.init_resampling = "timm"
    config.teacher = ""  # weights of the model that `distill` learns from
    config.train = "all"  # or 'routers'
    # Of routers: 'labels', or 'model', what the frozen model predicts unpruned.
    config.targets = "labels"
    # Pruning that grows: the rate of each of the first epochs goes from `start` to the model's own
    # in a line, rounded down to multiples of `step`. 0 epochs: the model's own from the first on.
    config.curriculum = ConfigDict({"epochs": 0.0, "start": 0, "step": 1})
    config.distributed = False  # call jax.distributed.initialize()

    config.data = ConfigDict(
        {
            "source": "tfds",
            "name": "",
            "dir": "",
            "env": "TFDS_DATA_DIR",
            "train": "train",
            "eval": {"test": "test"},
            "workers": 0,
        }
    )
    config.preprocess = ConfigDict(
        {
            "res": (224, 224),
            **IMAGENET,
            "interpolation": "bicubic",
            "crop_ratio": 0.875,
            "train": {
                "crop_scale": config_dict.placeholder(tuple),  # None: no random crop
                "flip": True,
                "rand_augment": "",
                "erase": 0.0,
            },
        }
    )
    config.preprocess.train.crop_scale = (0.08, 1.0)
    config.mixup = ConfigDict(
        {"mixup": 0.0, "cutmix": 0.0, "switch_prob": 0.5, "group": 512, "label_smoothing": 0.0}
    )
    config.optimizer = ConfigDict(
        {
            "lr": 1e-3,
            "lr_reference": 256,  # effective rate: lr * batch_size / lr_reference
            "min_lr": 1e-6,
            "warmup_epochs": 0.0,
            "schedule": "cosine",
            "weight_decay": 0.05,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "layer_decay": 1.0,
            "clip_norm": config_dict.placeholder(float),
            "freeze": (),
            "ema": config_dict.placeholder(float),
        }
    )
    config.mesh = ConfigDict({"data": -1, "fsdp": 1})
    config.cpu_devices = config_dict.placeholder(int)  # None: the CPU is one device
    return config


def run_locally(config: ConfigDict, schedule: str) -> ConfigDict:
    """Shrinks a config to two steps on made-up data, so that it runs on a laptop."""
    config.total_steps = LOCAL_STEPS
    config.batch_size = 8
    config.accum_steps = min(config.accum_steps, 2)
    config.eval_batch_size = 8
    config.log_every = 1
    config.init = ""
    classes = config.model.num_classes or 10
    config.model.num_classes = classes
    source = tasks.get(config.task).made_up
    config.data = ConfigDict(
        {
            "source": source,
            "name": source,
            "dir": "",
            "train": "train",
            "eval": {"test": "test"},
            "workers": 0,
            "num_examples": 24,
            "image_size": tuple(config.preprocess.res),
            "num_classes": classes,
        }
    )
    # With LLF a third stage after three of four blocks would be undone at once.
    config.model.depth = 2 * LOCAL_DEPTH if schedule == "three_stage" else LOCAL_DEPTH
    config.model.dtype = "float32"
    return config


def finish(config: ConfigDict, arg: Mapping[str, Any]) -> ConfigDict:
    """The last words of every recipe: what `train=routers` and `runlocal` change in it."""
    if arg["train"] == "routers":
        config.train = "routers"
        config.model.update({"drop_path": 0.0, "drop_path_last_block": 0.0})
        # Reducers have the full rate whatever it is, and nothing else is trained.
        config.optimizer.layer_decay = 1.0
    return run_locally(config, arg["schedule"]) if arg["runlocal"] else config
