"""From a config to everything a run needs, checked before anything slow happens.

`resolve` raises one clear error or returns a `Recipe`; `card` prints it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from cropr_jax import models, tasks
from cropr_jax.bench import flops
from cropr_jax.convert import resample
from cropr_jax.data import pipeline
from cropr_jax.errors import ConfigError
from cropr_jax.models.vit import ViT
from cropr_jax.reducers import registry
from cropr_jax.train import logging, optimizer, routers, schedules, sharding
from cropr_jax.train.mixup import MixupConfig
from cropr_jax.train.step import Step

# Names that a config may have, by section; those after None may be left out.
_MODEL = {"name", "variant", "reduction", *(f.name for f in dataclasses.fields(ViT))}
FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "": (
        {
            "task",
            "seed",
            "total_epochs",
            "batch_size",
            "eval_batch_size",
            "log_every",
            "eval_every",
            "checkpoint_every",
            "data",
            "preprocess",
            "mixup",
            "optimizer",
            "mesh",
            "model",
        },
        {
            "total_steps",
            "accum_steps",
            "cpu_devices",
            "init",
            "init_resampling",
            "teacher",
            "train",
            "targets",
            "distributed",
        },
    ),
    "data": (
        {"source", "train", "eval", "workers"},
        {"name", "dir", "env", "num_examples", "image_size", "num_classes"},
    ),
    "preprocess": ({"res", "mean", "std", "interpolation", "crop_ratio", "train"}, set()),
    "preprocess.train": ({"crop_scale", "flip", "rand_augment", "erase"}, set()),
    "mixup": ({"mixup", "cutmix", "switch_prob", "group", "label_smoothing"}, set()),
    "optimizer": (
        {
            "lr",
            "min_lr",
            "warmup_epochs",
            "schedule",
            "weight_decay",
            "betas",
            "eps",
            "layer_decay",
        },
        {"lr_reference", "clip_norm", "freeze", "ema"},
    ),
    "mesh": ({"data", "fsdp"}, set()),
    "model": ({"image_size", "num_classes", "reduction"}, _MODEL),
    "model.reduction": ({"name"}, {"schedule", "rate", "fusion", "options"}),
}
# Fields that may change between two starts of one run: none of them changes a trained number.
FREE = (
    "log_every",
    "eval_batch_size",
    "data.dir",
    "data.env",
    "data.workers",
    "data.eval",
    "mesh",
    "cpu_devices",
    "distributed",
)


def plain(config: Any) -> dict[str, Any]:
    """The config as nested dictionaries of JSON values (tuples become lists)."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    return json.loads(json.dumps(config))


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{'a.b': value}` of a nested dictionary."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= leaves(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def check_names(config: Mapping[str, Any]) -> None:
    """Refuses unknown and missing fields.

    Raises:
      ConfigError: naming the field, with the names that come close.
    """
    for section, (needed, optional) in FIELDS.items():
        node: Any = config
        for part in section.split(".") if section else ():
            node = node[part]
        where = f"config.{section}" if section else "config"
        if not isinstance(node, Mapping):
            raise ConfigError(f"{where}: found {node!r}, expected a section with {sorted(needed)}")
        for name in node:
            if name not in needed | optional:
                close = difflib.get_close_matches(name, needed | optional, 3, 0.5)
                hint = (
                    f"did you mean {' or '.join(close)}?"
                    if close
                    else (f"it may have {', '.join(sorted(needed | optional))}")
                )
                raise ConfigError(f"{where}.{name}: no such field; {hint}")
        for name in sorted(needed):
            if name not in node:
                raise ConfigError(f"{where}.{name} is missing")


def difference(
    config: Mapping[str, Any], before: Mapping[str, Any], free: Iterable[str] = FREE
) -> str | None:
    """Name of the first field that differs between two configs, None if only `free` ones do."""
    new, old = leaves(config), leaves(before)
    for name in sorted(new.keys() | old.keys()):
        if any(name == field or name.startswith(field + ".") for field in free):
            continue
        if new.get(name) != old.get(name):
            return name
    return None


def check_same(config: Mapping[str, Any], before: Mapping[str, Any], workdir: Any) -> None:
    """Refuses to go on in a work directory that another config began.

    Raises:
      ConfigError: naming the first field that differs and may not.
    """
    if name := difference(config, before):
        raise ConfigError(
            f"config.{name}: {leaves(config).get(name)!r}, but the run in '{workdir}' began with "
            f"{leaves(before).get(name)!r}: choose another --workdir, or remove that one"
        )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A config, resolved: what `train` and `evaluate` work with.

    Attributes:
      config: plain nested dictionaries.
      model: training form.
      teacher: unpruned model that is learnt from, None for none. Its parameters are
        `config.teacher`'s or, without that, those of the frozen model itself.
      task: module of `cropr_jax.tasks`.
      mesh: devices.
      schedule: learning rate by step.
      class_names: by label.
      trainable: names of the trained parameters.
      optimizer: of those.
      mixing: mixup, CutMix, label smoothing.
      examples: training examples.
      eval_examples: examples of each evaluation split.
      steps_per_epoch: optimizer steps of an epoch.
      total_steps: of the run.
      eval_every: steps between evaluations, 0 for one at the end only.
    """

    config: dict[str, Any]
    model: ViT
    teacher: ViT | None
    task: ModuleType
    mesh: Mesh
    schedule: schedules.WarmupCosine
    class_names: tuple[str, ...]
    trainable: tuple[str, ...]
    optimizer: optax.GradientTransformation
    mixing: MixupConfig
    examples: int
    eval_examples: dict[str, int]
    steps_per_epoch: int
    total_steps: int
    eval_every: int

    def step(self) -> Step:
        """The pure functions of a step."""
        return Step(
            model=self.model,
            task=self.task,
            optimizer=self.optimizer,
            schedule=self.schedule,
            trainable=self.trainable,
            mixing=self.mixing,
            accum_steps=self.config.get("accum_steps", 1),
            ema=self.config["optimizer"].get("ema"),
            seed=self.config["seed"],
            mesh=self.mesh,
            teacher=self.teacher,
            from_model=routers.from_model(self.config),
        )


def _positive(config: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        value = config.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"config.{name}: found {value!r}, expected a positive whole number")


def _check_batches(config: Mapping[str, Any], mixing: MixupConfig) -> None:
    """Batches must divide, on every device of every host, into equal micro-batches."""
    _positive(
        config, ("batch_size", "eval_batch_size", "accum_steps", "log_every", "checkpoint_every")
    )
    devices, accum = jax.device_count(), config.get("accum_steps", 1)
    parts = devices * accum
    if config["batch_size"] % parts:
        near = max(config["batch_size"] // parts, 1) * parts
        raise ConfigError(
            f"config.batch_size: {config['batch_size']} does not divide by {devices} devices x "
            f"{accum} accumulation steps; the nearest below is {near}"
        )
    if config["eval_batch_size"] % devices:
        raise ConfigError(
            f"config.eval_batch_size: {config['eval_batch_size']} does not divide by {devices} "
            "devices"
        )
    if mixing.active:
        mixing.groups(config["batch_size"])


def _check_data(config: Mapping[str, Any], model: ViT) -> tuple[int, dict[str, int]]:
    """Counts of the splits; the data must be there and suit the model."""
    size = tuple(config["preprocess"]["res"])
    if size != tuple(model.image_size):
        raise ConfigError(
            f"config.preprocess.res: {size}, but config.model.image_size is "
            f"{tuple(model.image_size)}: they must be equal"
        )
    examples = pipeline.num_examples(config)
    if examples < config["batch_size"]:
        raise ConfigError(
            f"config.batch_size: {config['batch_size']}, but the split "
            f"'{config['data']['train']}' has {examples} examples: choose a smaller batch"
        )
    classes = len(pipeline.class_names(config))
    if classes > model.num_classes:
        raise ConfigError(
            f"config.model.num_classes: {model.num_classes}, but the data set has {classes} classes"
        )
    names = config["data"]["eval"]
    if not names:
        raise ConfigError("config.data.eval: empty, expected {name: split}, e.g. {'test': 'test'}")
    return examples, {name: pipeline.num_examples(config, name) for name in names}


def make_teacher(config: Mapping[str, Any], model: ViT) -> ViT | None:
    """The unpruned model that is learnt from, None if nothing is.

    Raises:
      ConfigError: if `config.teacher` is missing, or nothing would use it.
    """
    path = config.get("teacher") or ""
    needed = model.reduction != "none" and model.make_reducer().needs_teacher
    if needed and not path:
        raise ConfigError(
            f"config.teacher: empty, but {model.reduction!r} with distill learns from an unpruned "
            "model: give its weights or work directory (trained with reduction=none), or leave "
            "distill off"
        )
    if path and not needed:
        raise ConfigError(
            f"config.teacher: '{path}', but {model.reduction!r} as it is set learns from no "
            "teacher: leave it empty, or use dynamicvit or sit with distill"
        )
    return models.unpruned(model) if needed or routers.from_model(config) else None


def total_steps(config: Mapping[str, Any], steps_per_epoch: int) -> tuple[int, int]:
    """Steps of the run and of its warm-up.

    `total_steps` shortens a run (or lengthens it); the warm-up keeps its share of it.

    Raises:
      ConfigError: if the run has no step, or the warm-up is longer than the run.
    """
    epochs, warmup = config["total_epochs"], config["optimizer"]["warmup_epochs"]
    if epochs <= 0 or not 0 <= warmup <= epochs:
        raise ConfigError(
            f"config.optimizer.warmup_epochs: {warmup} of config.total_epochs = {epochs}; expected "
            "0 <= warm-up <= total, and a total above 0"
        )
    # Rounded up, as the released code does both.
    total, warm = math.ceil(epochs * steps_per_epoch), math.ceil(warmup * steps_per_epoch)
    wanted = config.get("total_steps")
    if wanted is not None:
        _positive(config, ("total_steps",))
        total, warm = wanted, math.ceil(warmup / epochs * wanted)
    return total, warm


def resolve(config: Any) -> Recipe:
    """Checks a config and makes all that follows from it; compiles nothing, reads no image.

    Raises:
      ConfigError: naming field or file, what was found, what was expected.
    """
    values = plain(config)
    check_names(values)
    task = tasks.get(values["task"])
    mixing = MixupConfig(**values["mixup"])
    _check_batches(values, mixing)
    mesh = sharding.make_mesh(**values["mesh"])
    if not values["model"]["num_classes"]:  # those of the data
        values["model"]["num_classes"] = len(pipeline.class_names(values))
    model = models.create(values["model"])
    routers.check(values, model)
    teacher = make_teacher(values, model)
    examples, eval_examples = _check_data(values, model)

    per_epoch = pipeline.steps_per_epoch(values)
    total, warmup = total_steps(values, per_epoch)
    settings = values["optimizer"]
    models.choose("optimizer.schedule", settings["schedule"], ("cosine",))
    resample.check_rule(values.get("init_resampling") or "timm", "config.init_resampling")
    peak = schedules.effective_learning_rate(
        settings["lr"], values["batch_size"], settings.get("lr_reference", 256)
    )
    schedule = schedules.WarmupCosine(peak, settings["min_lr"], warmup, total)
    names = list(optimizer.flatten(models.abstract_params(model)))
    trainable = optimizer.trainable_names(names, routers.freeze(values))
    made = optimizer.adamw(
        trainable,
        model.depth,
        schedule,
        betas=tuple(settings["betas"]),
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
        layer_decay=settings["layer_decay"],
        clip_norm=settings.get("clip_norm"),
    )
    return Recipe(
        config=values,
        model=model,
        teacher=teacher,
        task=task,
        mesh=mesh,
        schedule=schedule,
        class_names=pipeline.class_names(values),
        trainable=trainable,
        optimizer=made,
        mixing=mixing,
        examples=examples,
        eval_examples=eval_examples,
        steps_per_epoch=per_epoch,
        total_steps=total,
        eval_every=round(values["eval_every"] * per_epoch) or int(values["eval_every"] > 0),
    )


def facts(recipe: Recipe) -> dict[str, Any]:
    """What the model costs: tokens after every site, TPR, parameters full and slim, MACs."""
    model = recipe.model
    height, width = model.grid
    params = models.abstract_params(model)
    slim = jax.eval_shape(lambda p: models.slim(model, p)[1], params)
    macs = flops.count(model.clone(slim=True))
    return {
        "tokens": list(model.schedule.tokens(height * width, model.prefix)),
        "tpr": model.schedule.tpr(height * width),
        "params": models.count(params),
        "params_slim": models.count(slim),
        "params_trained": sum(optimizer.flatten(params)[name].size for name in recipe.trainable),
        "macs_linear": macs.linear,
        "macs_all": macs.all,
    }


def _reduction(values: Mapping[str, Any]) -> str:
    """The method in words, with those options that are not its own defaults."""
    if values["name"] == "none":
        return "none"
    method = registry.method(values["name"])
    before = {"schedule": "", "rate": "R ", "fusion": "fusion "}
    words = [values["name"], *(f"{word}{values[k]}" for k, word in before.items() if k in values)]
    words += [
        f"{name} {value}"
        for name, value in values.get("options", {}).items()
        if value != getattr(method, name)
    ]
    return ", ".join(words)


def _losses(recipe: Recipe) -> str:
    """All losses in words."""
    model = recipe.model
    words = ["" if model.reduction == "none" else model.make_reducer().describe_losses]
    if routers.only(recipe.config):
        words += ["only the routers are trained"]
    if routers.from_model(recipe.config):
        words += ["targets are the predictions of the frozen model, unpruned"]
    return ", ".join(filter(None, ["cross-entropy", *words]))


def card(recipe: Recipe) -> str:
    """The resolved recipe in a table."""
    config, model, found = recipe.config, recipe.model, facts(recipe)
    height, width = model.grid
    accum = config.get("accum_steps", 1)
    settings = config["optimizer"]
    rows: list[tuple[str, Any]] = [
        (
            "data",
            f"{config['data'].get('name') or config['data']['source']}, {recipe.examples} "
            f"training images; " + ", ".join(f"{k} {v}" for k, v in recipe.eval_examples.items()),
        ),
        (
            "model",
            f"width {model.width}, depth {model.depth}, heads {model.heads}, image "
            f"{'x'.join(map(str, model.image_size))}, patch "
            f"{'x'.join(map(str, model.patch))}, pool {model.pool}, "
            f"{config['model'].get('dtype', 'float32')}",
        ),
        ("reduction", _reduction(config["model"]["reduction"])),
        ("losses", _losses(recipe)),
        (
            "tokens",
            f"{height * width + model.prefix} -> " + (" ".join(map(str, found["tokens"])) or "all"),
        ),
        ("total pruning ratio", f"{found['tpr']:.1%} of {height * width} patches"),
        (
            "parameters",
            f"{found['params']:,} in training ({found['params_trained']:,} trained), "
            f"{found['params_slim']:,} slim",
        ),
        (
            "MACs per image",
            f"{found['macs_linear'] / 1e9:.4g} G linear, {found['macs_all'] / 1e9:.4g} G with the "
            "attention products",
        ),
        (
            "batch",
            f"{config['batch_size']} images = {jax.device_count()} devices x {accum} "
            f"micro-batches x {config['batch_size'] // accum // jax.device_count()}",
        ),
        (
            "steps",
            f"{recipe.total_steps} = {recipe.total_steps / recipe.steps_per_epoch:.4g} epochs "
            f"of {recipe.steps_per_epoch}; warm-up {recipe.schedule.warmup_steps}",
        ),
        (
            "learning rate",
            f"{settings['lr']:g} x {config['batch_size']}/"
            f"{settings.get('lr_reference', 256)} = {recipe.schedule.peak:g}, cosine "
            f"to {settings['min_lr']:g}, layer decay {settings['layer_decay']:g}",
        ),
        (
            "AdamW",
            f"betas {tuple(settings['betas'])}, weight decay {settings['weight_decay']:g}, "
            f"clip {settings.get('clip_norm') or 'off'}, "
            f"average {settings.get('ema') or 'off'}",
        ),
        ("mixing", ", ".join(f"{k} {v:g}" for k, v in config["mixup"].items())),
        (
            "mesh",
            " x ".join(f"{axis} {size}" for axis, size in recipe.mesh.shape.items())
            + f" ({jax.devices()[0].device_kind}, {jax.process_count()} processes)",
        ),
        ("seed", config["seed"]),
    ]
    rows += [
        (words, config[field])
        for field, words in (("init", "starts from"), ("teacher", "learns from"))
        if config.get(field)
    ]
    return logging.table(rows, "Recipe")
