"""From a config to everything a run needs, checked before anything slow happens.

`resolve` raises one clear error or returns a `Recipe`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax import device_count
from jax.sharding import Mesh

from cropr_jax import models, tasks
from cropr_jax.core.schedule import Schedule
from cropr_jax.data import pipeline
from cropr_jax.data.open import Splits
from cropr_jax.data.records import Examples
from cropr_jax.errors import ConfigError
from cropr_jax.models import Trunk
from cropr_jax.tasks import Task
from cropr_jax.train import assemble, curriculum, fields, routers, sharding
from cropr_jax.train.curriculum import Curriculum
from cropr_jax.train.step import Step


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A config, resolved: what `train` and `evaluate` work with.

    Attributes:
      config: plain nested dictionaries.
      training: the step, with the model's own schedule of pruning.
      splits: of the data set, each opened once.
      curriculum: schedule of pruning by step.
      steps_per_epoch: optimizer steps of an epoch.
      total_steps: of the run.
      eval_every: steps between evaluations, 0 for one at the end only.
    """

    config: dict[str, Any]
    training: Step
    splits: Splits
    curriculum: Curriculum
    steps_per_epoch: int
    total_steps: int
    eval_every: int

    @property
    def model(self) -> Trunk:
        """Training form."""
        return self.training.model

    @property
    def task(self) -> Task:
        """Of the config."""
        return self.training.task

    @property
    def mesh(self) -> Mesh:
        """Devices."""
        return self.training.mesh

    @property
    def teacher_path(self) -> str:
        """Weights of the teacher; '' without one, or where it is the frozen model itself."""
        return self.config["teacher"]

    @property
    def class_names(self) -> tuple[str, ...]:
        """Of the training examples, by label."""
        return self.splits.train.class_names

    @property
    def eval_examples(self) -> dict[str, int]:
        """Examples of each evaluation split."""
        return {name: len(self.splits.eval(name)) for name in self.config["data"]["eval"]}

    def step(self, pruning: Schedule) -> Step:
        """The pure functions of a step with another schedule of pruning."""
        return dataclasses.replace(self.training, model=self.model.clone(schedule=pruning))

    def examples(self) -> Examples:
        """Of training."""
        return self.task.training(self.config["preprocess"], self.splits.train)

    def evaluation_examples(self, name: str) -> Examples:
        """Of the evaluation split called `name` in the config."""
        return self.task.evaluation(self.config["preprocess"], self.splits.eval(name))


def _check_batches(config: Mapping[str, Any]) -> None:
    assemble.check_batch(config)
    if config["eval_batch_size"] % device_count():
        raise ConfigError(
            f"config.eval_batch_size: {config['eval_batch_size']} does not divide by "
            f"{device_count()} devices"
        )


def _check_data(config: Mapping[str, Any], task: Task, model: Trunk, splits: Splits) -> None:
    """The data must be there and suit the model; all splits are opened."""
    size = tuple(config["preprocess"]["res"])
    if size != tuple(model.image_size):
        raise ConfigError(
            f"config.preprocess.res: {size}, but config.model.image_size is "
            f"{tuple(model.image_size)}: they must be equal"
        )
    task.train_transform(config["preprocess"])  # reads every field of it, and no image
    task.check(config, model, splits.train)
    if not config["data"]["eval"]:
        raise ConfigError("config.data.eval: empty, expected {name: split}, e.g. {'test': 'test'}")
    for name in config["data"]["eval"]:
        task.check_source(splits.eval(name))
        if splits.eval(name).num_classes > model.num_classes:
            raise ConfigError(
                f"config.data.eval.{name}: has {splits.eval(name).num_classes} classes, but "
                f"config.model.num_classes is {model.num_classes}: its labels reach beyond the head"
            )


def _check_head(config: Mapping[str, Any], task: type[Task]) -> None:
    """The model must predict what the task asks for."""
    if models.head_of(config["model"]) is not task.head:
        raise ConfigError(
            f"config.model.head: found {config['model'].get('head')!r}, but config.task is "
            f"{task.name!r}: they must be the same"
        )


def make_teacher(config: Mapping[str, Any], model: Trunk) -> Trunk | None:
    """The unpruned model that is learnt from, None if nothing is.

    Raises:
      ConfigError: if `config.teacher` is missing, or nothing would use it.
    """
    path = config["teacher"]
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


def resolve(config: Any, splits: Splits | None = None, class_names: Sequence[str] = ()) -> Recipe:
    """Checks a config and makes all that follows from it; compiles no model, reads no image.

    Args:
      config: an `ml_collections.ConfigDict`, or nested dictionaries of the same shape.
      splits: of its data set, if they were opened before.
      class_names: of the run, by label, if it began before.

    Raises:
      ConfigError: naming field or file, what was found, what was expected.
    """
    values = fields.plain(config)
    fields.check_task(values)
    kind = tasks.get(values["task"])
    fields.check(values, kind)
    values = fields.settled(values)
    task = kind.from_config(values)
    _check_batches(values)
    sharding.make_mesh(**values["mesh"])
    if options := values.get("compiler_options"):
        sharding.check_compiler_options(options)
    splits = splits or Splits(values["data"], class_names)
    task.check_source(splits.train)
    if not values["model"]["num_classes"]:  # those of the data
        values["model"]["num_classes"] = splits.train.num_classes
    _check_head(values, kind)
    model = models.create(values["model"])
    routers.check(values, model)
    teacher = make_teacher(values, model)
    _check_data(values, task, model, splits)

    per_epoch = pipeline.steps_per_epoch(len(splits.train), values)
    total, warmup = assemble.total_steps(values, per_epoch)
    return Recipe(
        config=values,
        training=assemble.make_step(
            values, model, task, warmup=warmup, total=total, teacher=teacher
        ),
        splits=splits,
        curriculum=curriculum.make(values, model, total / values["total_epochs"]),
        steps_per_epoch=per_epoch,
        total_steps=total,
        eval_every=round(values["eval_every"] * per_epoch) or int(values["eval_every"] > 0),
    )
