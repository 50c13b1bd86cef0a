"""What to time: a config file, or a variant's name with `key=value` pairs."""

from collections.abc import Mapping
from typing import Any

from cropr_jax import models
from cropr_jax.errors import ConfigError
from cropr_jax.host import schema
from cropr_jax.models import heads
from cropr_jax.models.fields import MODEL
from cropr_jax.reducers.registry import OF_FUSIONS

# R at 224 x 224 pixels: the paper's for ViT-B, L, H (section "Pruning schedule") and EVA-02-L (40
# at 448 pixels, Table "imagenet_sota"), ours for the others.
RATES = {
    "vit": {"ti": 16, "s": 16, "b": 16, "l": 8, "h": 8},
    "eva02": {"ti": 20, "s": 20, "b": 20, "l": 10},
}
RATE = 8  # of sizes without a name
SHORT = {
    "r": "reduction.rate",
    "schedule": "reduction.schedule",
    "fusion": "reduction.fusion",
    "res": "image_size",
    "classes": "num_classes",
    "queries": "num_queries",
}


def value_of(text: str) -> Any:
    """'8' -> 8, '4.0' -> 4.0, 'true' or 'True' -> True, '224x320' -> (224, 320); else the text."""
    if text in ("true", "True", "false", "False"):
        return text in ("true", "True")
    for kind in (int, float, lambda pair: tuple(int(side) for side in pair.split("x"))):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# How models without a config file train.
TRAINING = {
    "accum_steps": 1,
    "batch_size": 256,
    "mesh": {},
    "train": "all",
    "targets": "labels",
    "optimizer": {
        "lr": 1e-5,
        "min_lr": 0.0,
        "schedule": "cosine",
        "weight_decay": 0.05,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "layer_decay": 1.0,
    },
}


def is_file(config: str) -> bool:
    """Whether a config names a Python file rather than a variant."""
    return config.partition(":")[0].endswith(".py")


def load_file(config: str) -> dict[str, Any]:
    """The config of `FILE.py:ARGS` as nested dictionaries.

    Raises:
      ConfigError: if there is no such file, or it refuses its arguments.
    """
    from cropr_jax.host import config_file
    from cropr_jax.train import fields

    return fields.settled(fields.plain(config_file.load(config)))


def parse_variant(config: str) -> dict[str, Any]:
    """Fields of a model, as `models.create` takes them, from `vit_l,r=8,fusion=llf,res=224`.

    The first word is a variant such as `vit_ti` or `eva02_l`, or `vit` or `eva02` with `width=`,
    `depth=`, `heads=` and `patch=`. Then come short names (`r`, `schedule`, `fusion`, `res` as 224
    or 224x320, `classes`, `queries`) or any field of the model (`prefix=0`,
    `reduction.options.heads=16`). R defaults to the paper's (`RATES`) and grows with the area, as
    in the paper (8, 18 and 32 at 224, 336 and 448).

    Raises:
      ConfigError: on an unknown variant or a word that is no `key=value`.
    """
    first, *words = config.split(",")
    name, _, variant = first.partition("_")
    known = RATES.get(name, {})
    if name not in RATES or (first != name and variant not in known):
        expected = [f"{name}_{variant}" for name, known in RATES.items() for variant in known]
        raise ConfigError(
            f"--config: found {first!r}, expected a file such as configs/in1k.py:vit_l, or one of "
            f"{', '.join(map(repr, (*expected, *RATES)))}"
        )
    fields: dict[str, Any] = {"image_size": 224, "num_classes": 1000, "reduction": {}}
    fields |= {"name": name} | ({"variant": variant} if variant else {})
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"--config: found {word!r} in '{config}', expected key=value")
        *parents, last = SHORT.get(key, key).split(".")
        node = fields
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value_of(text)
    schema.check_values("config.model", MODEL, fields)
    side = fields["image_size"]
    area = side * side if isinstance(side, int) else side[0] * side[1]
    rate = round(known.get(variant, RATE) * area / 224**2)
    fields["reduction"].setdefault("rate", rate)
    return fields


def model_fields(config: str) -> dict[str, Any]:
    """Fields of the model that a config file or a variant describes."""
    return load_file(config)["model"] if is_file(config) else parse_variant(config)


def training_fields(config: str) -> dict[str, Any]:
    """The fields of a config that its training step is made of; of a variant `TRAINING`."""
    if is_file(config):
        return load_file(config)
    head = parse_variant(config).get("head") or heads.DEFAULT
    return TRAINING | {"task": head}


def split_options(name: str) -> tuple[str, dict[str, str]]:
    """A method and its options: 'cropr:heads=3:mlp=False' -> 'cropr', its two options as text.

    Raises:
      ConfigError: if what follows the name is no option.
    """
    method, *words = name.split(":")
    pairs = [word.partition("=") for word in words]
    if not all(option and equals for option, equals, _ in pairs):
        raise ConfigError(f"method: found {name!r}, expected METHOD:OPTION=VALUE")
    return method, {option: text for option, _, text in pairs}


def with_reduction(fields: Mapping[str, Any], name: str, **more: Any) -> dict[str, Any]:
    """The same model with another reduction method at the same schedule.

    Options of the config's own method are left out for another method; 'none' has no schedule, and
    the method of a fusion brings that along.

    Args:
      fields: of the model.
      name: of the method; options may follow, as in 'cropr:train_queries=128:remat=true'.
      **more: fields to replace.

    Raises:
      ConfigError: if what follows the name is no option.
    """
    method, words = split_options(name)
    before = dict(fields.get("reduction", {}))
    if method == "none" and not words:
        return {**fields, **more, "reduction": {"name": "none"}}
    if before.pop("name", "cropr") != method:
        before.pop("options", None)
    asked = {**before, "name": method}
    if words:
        options = {option: value_of(text) for option, text in words.items()}
        asked["options"] = {**asked.get("options", {}), **options}
    if method in OF_FUSIONS:
        asked["fusion"] = method
    return {**fields, **more, "reduction": asked}


def fit_fusion(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same model, without Last Layer Fusion if its method refuses it and its head can do so.

    Raises:
      ConfigError: if there is no such method or model.
    """
    reduction = dict(fields["reduction"])
    if reduction.get("name", "none") == "none" or models.head_of(fields).dense:
        return dict(fields)
    # Whatever the rate asked for can be met.
    trial = models.create({**fields, "reduction": {**reduction, "rate": 0, "fusion": "none"}})
    more = {"fusion": "none"} if trial.make_reducer().refuses_fusion else {}
    return {**fields, "reduction": reduction | more}
