"""What all configs share: parsing of the argument after the colon, and the shape of a config.

A config file has one function, `get_config(arg)`; `arg` is what follows the colon in
`--config configs/in1k.py:vit_l,res=336`: an optional variant first, then `key=value` pairs, a bare
key meaning true.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict, config_dict

from cropr_jax.errors import ConfigError
from cropr_jax.fusion import POOLED_FUSIONS
from cropr_jax.reducers.registry import REDUCERS

REDUCTIONS = ("none", *REDUCERS)
TRAIN = ("all", "routers")
SCHEDULES = ("per_block", "three_stage", "aggressive")

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
# OpenAI's CLIP and all that descends from it, EVA-02 too.
CLIP = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
NORMALIZATIONS = {"imagenet": IMAGENET, "half": HALF, "clip": CLIP}

# What a method can be told beside its name; the defaults are the paper's own design, the other
# values its ablations (Tables "cross-attn", "mlp", "grad_mode", "sel-meth").
CROPR_OPTIONS = {
    "heads": 1,
    "projections": False,
    "pre_norm": False,
    "mlp": True,
    "stop_gradient": True,
    "selector": "topk",
    "sample_in_eval": False,
}
OPTIONS = {
    "cropr": CROPR_OPTIONS,
    "non_salient": CROPR_OPTIONS,
    "attn_topk": {"source": "cls_row", "inverse": False, "placement": "after"},
    # 'tokenreduction': what JoakimHaurum/TokenReduction does where it differs from the paper.
    "kmedoids": {"iterations": 3, "variant": "paper"},
    "ats": {"variant": "paper"},
    "dpc_knn": {"neighbours": 5, "equal_weight": False},
    "evit": {"fuse": True, "renormalise": False},
    # Off for MAE-pretrained models that are not trained with ToMe.
    "tome": {"proportional": True},
    "dynamicvit": {"ratio_weight": 2.0},
    # 'width' divides the logits by the root of the width, as lucidrains/vit-pytorch does.
    "patchmerger": {"scale": "none", "init_std": 1.0},
    # False and True keep the magnitude of the tokens, which the reference loses.
    "sinkhorn": {"epsilon": 1.0, "iterations": 3, "unit_values": True, "averages": False},
}
# What `distill` adds: losses against an unpruned model, `config.teacher`, of the same sizes, pool
# and classes. They are part of both papers, but off by default: most users have no teacher, and the
# code that the Cropr paper compares with (JoakimHaurum/TokenReduction) leaves SiT's out.
DISTILLATION = {
    "dynamicvit": {"distill": True, "distill_weight": 0.5, "token_loss": "mse"},
    "sit": {"distill": True, "token_weight": 2.0, "logit_weight": 2.0},
}

# The paper's Pool column, where it differs from the backbone's own: CLS where the method reads it,
# and for merged tokens the mean over the patches that they stand for.
POOLS = {"attn_topk": "cls", "ats": "cls", "evit": "cls", "tome": "mean_size_weighted"}

# `runlocal` keeps everything but the sizes: depth, data and batch shrink, and so do images that are
# larger than this unless `res` is given.
LOCAL_RES = 224
LOCAL_DEPTH = 4
LOCAL_STEPS = 2

SHARED = {
    "reduction": "cropr",
    "schedule": "per_block",
    "r": -1,  # negative: the recipe's own
    # Empty: LLF, but none with schedule=aggressive, where the method refuses it, or where the last
    # block is frozen (train=routers), which has never met tokens of earlier blocks.
    "fusion": "",
    "res": 0,  # 0: the recipe's own
    "seed": 0,
    "distill": False,
    "train": "all",  # or the routers of a given model only: --config.init
    "runlocal": False,
}


def parse_arg(
    arg: str | None,
    variants: Sequence[str] = (),
    fusions: Sequence[str] = POOLED_FUSIONS,
    **defaults: Any,
) -> ConfigDict:
    """Arguments of a config, typed by their defaults.

    Args:
      arg: `variant,key=value,flag`, or None.
      variants: allowed first words; the first of them is the default. Empty: there is none.
      fusions: allowed values of `fusion`.
      **defaults: further keys beside the shared ones, or other defaults of those.

    Raises:
      ConfigError: on an unknown variant or key, or a value of another type.
    """
    values = SHARED | defaults
    words = [word for word in (arg or "").split(",") if word]
    parsed = ConfigDict(values)
    if variants:
        parsed.variant = variants[0]
        if words and "=" not in words[0] and words[0] not in values:
            parsed.variant = words.pop(0)
        if parsed.variant not in variants:
            raise ConfigError(
                f"--config variant: found {parsed.variant!r}, expected one of {list(variants)}"
            )
    for word in words:
        key, separator, text = word.partition("=")
        if key not in values:
            raise ConfigError(f"--config argument {key!r} is unknown; known are {sorted(values)}")
        parsed[key] = _typed(key, text if separator else "true", values[key])
    for key, options in (
        ("reduction", REDUCTIONS),
        ("schedule", SCHEDULES),
        ("fusion", (*fusions, SHARED["fusion"])),
        ("train", TRAIN),
    ):
        if parsed[key] not in options:
            raise ConfigError(f"--config {key}: found {parsed[key]!r}, expected one of {options}")
    if parsed.distill and parsed.reduction not in DISTILLATION:
        raise ConfigError(
            f"--config distill: {parsed.reduction!r} learns from no teacher, "
            f"{' and '.join(DISTILLATION)} can"
        )
    if not parsed.fusion:
        method = REDUCERS.get(parsed.reduction)
        refuses = parsed.schedule == "aggressive" or (method and method().refuses_fusion)
        parsed.fusion = "none" if refuses or parsed.train == "routers" else "llf"
    return parsed


def _typed(key: str, text: str, default: Any) -> Any:
    kind = type(default)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"--config argument {key}: found {text!r}, expected a value of type {kind.__name__}"
        ) from error


def base(arg: Mapping[str, Any]) -> ConfigDict:
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
    # How they get to another grid and patch: 'timm' (as None) or 'torch', MAE's and EVA's own way.
    config.init_resampling = config_dict.placeholder(str)
    config.teacher = config_dict.placeholder(str)  # weights of the model that `distill` learns from
    config.train = config_dict.placeholder(str)  # 'all' (as None) or 'routers'
    # Of routers: 'labels' (as None), or 'model', what the frozen model predicts unpruned.
    config.targets = config_dict.placeholder(str)
    # Pruning that grows: the rate of each of the first epochs goes from `start` to the model's own
    # in a line, rounded down to multiples of `step`. 0 epochs: the model's own from the first on.
    # None: 0 epochs, from 0, in steps of 1.
    config.curriculum = ConfigDict(
        {
            "epochs": config_dict.placeholder(float),
            "start": config_dict.placeholder(int),
            "step": config_dict.placeholder(int),
        }
    )
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


def reduction(arg: Mapping[str, Any], rate: int, patches: int) -> ConfigDict:
    """The `model.reduction` of the shared arguments.

    Args:
      arg: parsed arguments.
      rate: R of the per-block schedule unless `r=` says otherwise.
      patches: patch tokens of the model. The other schedules default to the paper's shares of
        them: 50 of 196 tokens at each of three stages (Table "cls_cmp"), 825 of 1,024 at once
        (Table "imagenet_sota").
    """
    rates = {
        "per_block": rate,
        "three_stage": patches * 50 // 196,
        "aggressive": patches * 825 // 1024,
    }
    return ConfigDict(
        {
            "name": arg["reduction"],
            "schedule": arg["schedule"],
            "rate": rates[arg["schedule"]] if arg["r"] < 0 else arg["r"],
            "fusion": arg["fusion"],
            "options": OPTIONS.get(arg["reduction"], {})
            | (DISTILLATION[arg["reduction"]] if arg["distill"] else {}),
        }
    )


def pool(arg: Mapping[str, Any], default: str) -> str:
    """The pool of the method, or the default; a backbone that pools CLS does so with any method."""
    return default if default == "cls" else POOLS.get(arg["reduction"], default)


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
    source = "fake" if config.task == "classification" else "fake_segmentation"
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


def pick(key: str, name: str, options: Mapping[str, Any]) -> Any:
    """The option called `name`.

    Raises:
      ConfigError: if there is none.
    """
    if name not in options:
        raise ConfigError(f"--config {key}: found {name!r}, expected one of {sorted(options)}")
    return options[name]


def fine_tuning(
    config: ConfigDict,
    arg: ConfigDict,
    *,
    data: Mapping[str, Any],
    spec: Any,
    rate: int,
    res: int,
    num_classes: int,
) -> ConfigDict:
    """A short fine-tuning recipe for CLS-trained weights on a small data set.

    Args:
      config: from `base`.
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
        {"res": (res, res), **pick("norm", arg.norm, NORMALIZATIONS), "crop_ratio": 1.0}
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
            "reduction": reduction(arg, rate, (res // spec.patch) ** 2),
        }
    )
    return finish(config, arg)
