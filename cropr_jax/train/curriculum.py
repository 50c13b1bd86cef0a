"""Pruning that grows during training: a schedule for every step.

Source: section "Semantic segmentation" of the paper, R from 1 to 40 over the first half of the
epochs; benbergner/cropr: segm/segmenter.py, which begins with 0 and cuts off fractions. It prunes a
token for CLS even at rate 0; here nothing is pruned then.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cropr_jax import models
from cropr_jax.core.schedule import Schedule
from cropr_jax.errors import ConfigError
from cropr_jax.models import Trunk


def rates(start: int, final: int, epochs: int, step: int = 1) -> tuple[int, ...]:
    """Pruning rate of each epoch of the curriculum: a line from `start` to `final`, rounded down.

    Args:
      start: rate of the first epoch.
      final: R, rate of the last one and of all that follow.
      epochs: of the curriculum.
      step: rates are rounded down to multiples of it, which makes fewer programs to compile.
    """
    line = np.linspace(start, final, epochs).astype(int)
    return tuple(int(rate) if rate == final else int(rate) // step * step for rate in line)


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Schedules by step.

    Attributes:
      first: (rate, schedule) of each epoch of the curriculum; empty for none.
      last: schedule of all later steps, the model's own.
      epoch_steps: steps of an epoch, perhaps a fraction in a shortened run.
    """

    first: tuple[tuple[int, Schedule], ...]
    last: Schedule
    epoch_steps: float

    def at(self, step: int) -> Schedule:
        """Schedule of a step, counted from 0."""
        epoch = math.floor(step / self.epoch_steps)
        return self.first[epoch][1] if epoch < len(self.first) else self.last

    def describe(self) -> str:
        """In words; empty without a curriculum."""
        if not self.first:
            return ""
        distinct = list(dict.fromkeys(rate for rate, _ in self.first))
        return f"R {' '.join(map(str, distinct))} in the first {len(self.first)} epochs"


def make(config: Mapping[str, Any], model: Trunk, epoch_steps: float | int) -> Curriculum:
    """The curriculum of a config.

    Args:
      config: plain values. `curriculum` is {epochs, start, step}; with 0 epochs every step has the
        model's schedule.
      model: with that schedule.
      epoch_steps: steps of an epoch.

    Raises:
      ConfigError: on a wrong field, or a method whose parameters depend on the rate.
    """
    settings = config["curriculum"]
    if not settings["epochs"]:
        return Curriculum((), model.schedule, epoch_steps)
    if model.reduction == "none":
        raise ConfigError(
            f"config.curriculum.epochs: {settings['epochs']}, but the model prunes nothing: set 0"
        )
    final = config["model"]["reduction"]["rate"]
    _check(settings, final, config["total_epochs"])
    made: dict[int, Schedule] = {}
    line = rates(settings["start"], final, int(settings["epochs"]), settings["step"])
    for rate in dict.fromkeys(line):
        reduction = config["model"]["reduction"] | {"rate": rate}
        other = models.create(config["model"] | {"reduction": reduction})
        if not made and models.abstract_params(other) != models.abstract_params(model):
            raise ConfigError(
                f"config.curriculum.epochs: {settings['epochs']}, but the parameters of "
                f"{model.reduction!r} are made for one pruning rate: set 0"
            )
        made[rate] = other.schedule
    return Curriculum(tuple((rate, made[rate]) for rate in line), model.schedule, epoch_steps)


def _check(settings: Mapping[str, Any], final: int, total_epochs: float | int) -> None:
    epochs, start, step = settings["epochs"], settings["start"], settings["step"]
    if epochs != int(epochs) or not 0 < epochs <= total_epochs:
        raise ConfigError(
            f"config.curriculum.epochs: found {epochs}, expected a whole number from 0 (none) to "
            f"config.total_epochs = {total_epochs:g}"
        )
    if not isinstance(start, int) or not 0 <= start <= final:
        raise ConfigError(
            f"config.curriculum.start: found {start!r}, expected a whole number from 0 to "
            f"config.model.reduction.rate = {final}"
        )
    if not isinstance(step, int) or step < 1:
        raise ConfigError(f"config.curriculum.step: found {step!r}, expected a whole number from 1")
