"""From a config to everything a run needs, checked before anything slow happens.

`resolve` raises one clear error or returns a `Recipe`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import optax
from jax import device_count
from jax.sharding import Mesh

from cropr_jax import models, tasks
from cropr_jax.convert import resample
from cropr_jax.data import pipeline
from cropr_jax.errors import ConfigError
from cropr_jax.models.vit import ViT
from cropr_jax.schedule import Schedule
from cropr_jax.train import curriculum, fields, optimizer, routers, schedules, sharding
from cropr_jax.train.curriculum import Curriculum
from cropr_jax.train.mixup import MixupConfig
from cropr_jax.train.step import Step

DECAYS: dict[str, Any] = {"cosine": schedules.WarmupCosine, "poly": schedules.WarmupPoly}


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
      curriculum: pruning schedule by step.
      class_names: by label.
      trainable: names of the trained parameters.
      optimizer: of those.
      mixing: mixup, CutMix, label smoothing; None for a task whose images are not mixed.
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
    schedule: schedules.Decay
    curriculum: Curriculum
    class_names: tuple[str, ...]
    trainable: tuple[str, ...]
    optimizer: optax.GradientTransformation
    mixing: MixupConfig | None
    examples: int
    eval_examples: dict[str, int]
    steps_per_epoch: int
    total_steps: int
    eval_every: int

    def step(self, schedule: Schedule | None = None) -> Step:
        """The pure functions of a step.

        Args:
          schedule: of pruning, the model's own by default.
        """
        return Step(
            model=self.model.clone(schedule=schedule or self.model.schedule),
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


def _check_batches(config: Mapping[str, Any], mixing: MixupConfig | None) -> None:
    """Batches must divide, on every device of every host, into equal micro-batches."""
    _positive(
        config, ("batch_size", "eval_batch_size", "accum_steps", "log_every", "checkpoint_every")
    )
    devices, accum = device_count(), config.get("accum_steps", 1)
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
    if mixing is not None and mixing.active:
        mixing.groups(config["batch_size"])


def _check_data(config: Mapping[str, Any], model: ViT) -> tuple[int, dict[str, int]]:
    """Counts of the splits; the data must be there and suit the model."""
    size = tuple(config["preprocess"]["res"])
    if size != tuple(model.image_size):
        raise ConfigError(
            f"config.preprocess.res: {size}, but config.model.image_size is "
            f"{tuple(model.image_size)}: they must be equal"
        )
    pipeline.check_preprocess(config)
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
    if classes < model.num_classes and hasattr(tasks.get(config["task"]), "per_class"):
        raise ConfigError(
            f"config.model.num_classes: {model.num_classes}, but the data set names {classes} "
            "classes, and the results are by class: set 0 to take their number from the data"
        )
    names = config["data"]["eval"]
    if not names:
        raise ConfigError("config.data.eval: empty, expected {name: split}, e.g. {'test': 'test'}")
    return examples, {name: pipeline.num_examples(config, name) for name in names}


def _check_head(config: Mapping[str, Any]) -> None:
    """The model must predict what the task asks for."""
    head = config["model"].get("head") or "classification"
    if head != config["task"]:
        raise ConfigError(
            f"config.model.head: found {head!r}, but config.task is {config['task']!r}: they must "
            "be the same"
        )


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
    """Checks a config and makes all that follows from it; compiles no model, reads no image.

    Raises:
      ConfigError: naming field or file, what was found, what was expected.
    """
    values = fields.plain(config)
    fields.check_names(values)
    task = tasks.get(values["task"])
    mixing = MixupConfig(**values["mixup"]) if "mixup" in values else None
    _check_batches(values, mixing)
    mesh = sharding.make_mesh(**values["mesh"])
    if options := values.get("compiler_options"):
        sharding.check_compiler_options(options)
    if not values["model"]["num_classes"]:  # those of the data
        values["model"]["num_classes"] = len(pipeline.class_names(values))
    _check_head(values)
    model = models.create(values["model"])
    routers.check(values, model)
    teacher = make_teacher(values, model)
    examples, eval_examples = _check_data(values, model)

    per_epoch = pipeline.steps_per_epoch(values)
    total, warmup = total_steps(values, per_epoch)
    settings = values["optimizer"]
    decay = DECAYS[models.choose("optimizer.schedule", settings["schedule"], DECAYS)]
    if decay is schedules.WarmupPoly and "power" in settings:
        if settings["power"] <= 0:
            raise ConfigError(
                f"config.optimizer.power: found {settings['power']!r}, expected a positive number"
            )
        decay = functools.partial(decay, power=settings["power"])
    resample.check_rule(values.get("init_resampling") or "timm", "config.init_resampling")
    peak = schedules.effective_learning_rate(
        settings["lr"], values["batch_size"], settings.get("lr_reference", 256)
    )
    schedule = decay(peak, settings["min_lr"], warmup, total)
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
        curriculum=curriculum.make(values, model, total / values["total_epochs"]),
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
