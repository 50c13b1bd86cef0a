"""Learning rate by step: linear warm-up, then half a cosine or a power of what is left.

Sources: `benbergner/cropr: cls/utils.py` (`cosine_scheduler`) and `segm/optim/scheduler.py`
(`PolynomialLR`), which gave the published numbers, and facts of the paper's tables of
hyperparameters (`tab:in_mae_hyperp`, `tab:ade_hyperp`).

The cosine differs from `optax.warmup_cosine_decay_schedule` as the released code does: the warm-up
is a line through both ends (its last step already has the peak, and the cosine starts there once
more), and the first value, 0, is replaced by the second, so that no step is wasted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from cropr_jax.errors import ConfigError
from cropr_jax.host.messages import check_choice


def effective_learning_rate(
    base: float | int, batch_size: int, reference: float | int = 256
) -> float:
    """Peak rate of a batch of `batch_size` images: `base * batch_size / reference`.

    The linear scaling rule; `batch_size` counts all the images of an optimizer step, over devices
    and accumulation (1e-3 at 1024 images gives the 4e-3 of the paper's table).
    """
    return base * batch_size / reference


@dataclasses.dataclass(frozen=True)
class Decay:
    """Learning rate of each step, a pure function usable in and out of `jax.jit`.

    Attributes:
      peak: rate at the end of the warm-up.
      floor: rate that would be reached at step `total_steps`.
      warmup_steps: steps of the warm-up, 0 for none.
      total_steps: steps of the whole run.
    """

    peak: float | int
    floor: float | int
    warmup_steps: int
    total_steps: int

    def __post_init__(self):
        if self.total_steps < 1:
            raise ConfigError(f"total_steps is {self.total_steps}: a run needs at least one step")
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise ConfigError(
                f"the warm-up takes {self.warmup_steps} of {self.total_steps} steps: set "
                "config.optimizer.warmup_epochs between 0 and total_epochs"
            )

    @classmethod
    def from_epochs(
        cls,
        peak: float,
        floor: float,
        steps_per_epoch: float | int,
        epochs: float | int,
        warmup_epochs: float | int,
    ) -> Decay:
        """Steps from epochs; `steps_per_epoch` may be a fraction, counts round up as released."""
        return cls(
            peak,
            floor,
            math.ceil(warmup_epochs * steps_per_epoch),
            math.ceil(epochs * steps_per_epoch),
        )

    def __call__(self, step: ArrayLike) -> jax.Array:
        """Rate of `step` (counted from 0), float32; beyond the end it stays at the last value."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class WarmupCosine(Decay):
    """Half a cosine after the warm-up."""

    def __call__(self, step: ArrayLike) -> jax.Array:
        """Rate of `step` (counted from 0), float32; beyond the end it stays at the last value."""
        step = jnp.asarray(step)
        # Values of a line from 0 with `warmup_steps` points; one point alone would be 0, a wasted
        # step, so it gets the peak.
        points = max(self.warmup_steps - 1, 1)
        warm = self.peak * jnp.maximum(step, 1).astype(jnp.float32) / points
        decay_steps = max(self.total_steps - self.warmup_steps, 1)
        done = jnp.clip(step - self.warmup_steps, 0, decay_steps).astype(jnp.float32)
        # (1 + cos x) / 2 = cos^2(x / 2): the left side loses all digits near the end in float32.
        cosine = jnp.square(jnp.cos(done * (0.5 * math.pi / decay_steps)))
        decayed = self.floor + (self.peak - self.floor) * cosine
        return jnp.where(step < self.warmup_steps, jnp.minimum(warm, self.peak), decayed)


@dataclasses.dataclass(frozen=True)
class WarmupPoly(Decay):
    """A power of the share of the run that is left; the warm-up is a line from 0 to that curve.

    As in `WarmupCosine` the first value, 0, is replaced by the second.

    Attributes:
      power: 1 for a line.
    """

    power: float = 0.9

    def __call__(self, step: ArrayLike) -> jax.Array:
        step = jnp.asarray(step)
        warmup = max(self.warmup_steps, 1)
        left = self.total_steps - jnp.clip(step, self.warmup_steps, self.total_steps)
        curve = (left.astype(jnp.float32) / self.total_steps) ** self.power
        warm = jnp.clip(step, 1, warmup).astype(jnp.float32) / warmup
        return self.floor + (self.peak - self.floor) * curve * jnp.where(
            step < self.warmup_steps, warm, 1.0
        )


DECAYS: dict[str, Any] = {"cosine": WarmupCosine, "poly": WarmupPoly}


def make(settings: Mapping[str, Any], batch_size: int, warmup: int, total: int) -> Decay:
    """The learning rate of a config.

    Args:
      settings: `config.optimizer`.
      batch_size: examples of a step.
      warmup, total: steps of the warm-up and of the run.

    Raises:
      ConfigError: on a wrong field.
    """
    decay = DECAYS[check_choice("optimizer.schedule", settings["schedule"], DECAYS)]
    if decay is WarmupPoly and settings.get("power") is not None:
        decay = functools.partial(decay, power=settings["power"])
    peak = effective_learning_rate(settings["lr"], batch_size, settings.get("lr_reference") or 256)
    if settings["min_lr"] > peak:
        raise ConfigError(
            f"config.optimizer.min_lr: found {settings['min_lr']}, expected no more than the peak, "
            f"which is {peak:.3g} with config.optimizer.lr = {settings['lr']} at {batch_size} "
            "examples"
        )
    return decay(peak, settings["min_lr"], warmup, total)
