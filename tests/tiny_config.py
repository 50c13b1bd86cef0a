"""The smallest run that uses every part: a config file for the tests of the loop and of run.py."""

from ml_collections import config_dict

MAP_SIZE = (8, 12)


def get_config(arg: str = "") -> config_dict.ConfigDict:
    """Eight steps on made-up images; `arg` may be 'reduction=NAME'."""
    reduction = arg.partition("=")[2] or "cropr"
    return config_dict.ConfigDict(
        {
            "task": "classification",
            "seed": 1,
            "total_epochs": 2.0,
            "total_steps": config_dict.placeholder(int),
            "batch_size": 16,
            "accum_steps": 1,
            "eval_batch_size": 16,
            "log_every": 2,
            "eval_every": 1.0,
            "checkpoint_every": 3,
            "data": {
                "source": "fake",
                "name": "",
                "dir": "",
                "train": "train[:64]",
                "eval": {"test": "test[64:85]"},
                "workers": 0,
                "num_examples": 85,
                "image_size": (8, 8),
                "num_classes": 4,
            },
            "preprocess": {
                "res": (8, 8),
                "mean": (0.5, 0.5, 0.5),
                "std": (0.5, 0.5, 0.5),
                "interpolation": "bicubic",
                "crop_ratio": "none",
                "train": {"crop_scale": None, "flip": True, "rand_augment": "", "erase": 0.0},
            },
            "mixup": {
                "mixup": 0.8,
                "cutmix": 1.0,
                "switch_prob": 0.5,
                "group": 8,
                "label_smoothing": 0.1,
            },
            "optimizer": {
                "lr": 0.05,
                "lr_reference": 256,
                "min_lr": 1e-6,
                "warmup_epochs": 0.5,
                "schedule": "cosine",
                "weight_decay": 0.05,
                "betas": (0.9, 0.999),
                "eps": 1e-8,
                "layer_decay": 0.75,
                "clip_norm": config_dict.placeholder(float),
                "freeze": (),
                "ema": config_dict.placeholder(float),
            },
            "mesh": {"data": -1, "fsdp": 1},
            "init": "",
            "distributed": False,
            "model": {
                "name": "vit",
                "width": 16,
                "depth": 3,
                "heads": 2,
                "patch": 2,
                "image_size": (8, 8),
                "num_classes": 4,
                "drop_path": 0.1,
                "reduction": {
                    "name": reduction,
                    "schedule": "per_block",
                    "rate": 3,
                    "fusion": "llf",
                },
            },
        }
    )


def segmentation_config(curriculum=None):
    """The same of made-up maps: images of 8 x 12 pixels, 4 x 6 patches."""
    config = get_config()
    with config.unlocked():
        del config["mixup"]
        config.task = "segmentation"
        config.data.update({"source": "fake_segmentation", "image_size": MAP_SIZE})
        config.preprocess = {
            "res": MAP_SIZE,
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "train": {
                "resize_base": (12, 8),
                "ratio_range": (0.5, 2.0),
                "cat_max_ratio": 0.75,
                "flip": True,
                "photometric": True,
            },
        }
        config.model.update({"head": "segmentation", "image_size": MAP_SIZE})
        config.optimizer.update({"schedule": "poly", "power": 0.9})
        config.curriculum = curriculum or {"epochs": 0}
    return config
