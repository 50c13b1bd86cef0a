"""A config's model and task put together to the step that trains, which `bench` times too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jax import device_count

from cropr_jax import models
from cropr_jax.core import trees
from cropr_jax.errors import ConfigError
from cropr_jax.models import Trunk
from cropr_jax.tasks import Task
from cropr_jax.train import learning_rate, optimizer, routers, sharding
from cropr_jax.train.step import Step


def check_batch(config: Mapping[str, Any]) -> None:
    """Batches must divide, on every device of every host, into equal micro-batches.

    Raises:
      ConfigError: naming the field.
    """
    devices, accum = device_count(), config.get("accum_steps", 1)
    parts = devices * accum
    if config["batch_size"] % parts:
        below = config["batch_size"] // parts * parts
        near = f"the nearest below is {below}" if below else f"the smallest is {parts}"
        raise ConfigError(
            f"config.batch_size: {config['batch_size']} does not divide by {devices} devices x "
            f"{accum} accumulation steps; {near}"
        )


def total_steps(config: Mapping[str, Any], steps_per_epoch: int) -> tuple[int, int]:
    """Steps of the run and of its warm-up.

    `total_steps` shortens a run (or lengthens it); the warm-up keeps its share of it.

    Raises:
      ConfigError: if the run has no step, or the warm-up is longer than the run.
    """
    epochs, warmup = config["total_epochs"], config["optimizer"]["warmup_epochs"]
    if warmup > epochs:
        raise ConfigError(
            f"config.optimizer.warmup_epochs: found {warmup}, expected no more than "
            f"config.total_epochs, which is {epochs}"
        )
    # Rounded up, as the released code does both.
    total, warm = math.ceil(epochs * steps_per_epoch), math.ceil(warmup * steps_per_epoch)
    wanted = config.get("total_steps")
    if wanted is not None:
        total, warm = wanted, math.ceil(warmup / epochs * wanted)
    return total, warm


def make_step(
    config: Mapping[str, Any],
    model: Trunk,
    task: Task,
    *,
    warmup: int,
    total: int,
    teacher: Trunk | None = None,
) -> Step:
    """The pure functions of a step, as the config has them.

    Args:
      config: plain values: `batch_size`, `optimizer`, and perhaps `accum_steps`, `mesh`,
        `train` and `targets`.
      model: training form.
      task: of the config.
      warmup, total: steps of the warm-up and of the run.
      teacher: that is learnt from.

    Raises:
      ConfigError: naming the field.
    """
    settings = config["optimizer"]
    rate = learning_rate.make(settings, config["batch_size"], warmup, total)
    names = list(trees.flatten(models.abstract_params(model)))
    trainable = optimizer.trainable(names, routers.freeze(config))
    made = optimizer.adamw(
        trainable,
        model.depth,
        rate,
        betas=tuple(settings["betas"]),
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
        layer_decay=settings["layer_decay"],
        clip_norm=settings.get("clip_norm"),
    )
    return Step(
        model=model,
        task=task,
        optimizer=made,
        learning_rate=rate,
        trainable=trainable,
        accum_steps=config.get("accum_steps", 1),
        ema=settings.get("ema"),
        mesh=sharding.make_mesh(**config.get("mesh", {})),
        teacher=teacher,
        from_model=routers.from_model(config),
    )
