"""The state that a training step changes, and its trained and frozen parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cropr_jax.core.trees import flatten, unflatten

Flat = dict[str, jax.Array]


class TrainState(NamedTuple):
    """All that a step changes, and all that a checkpoint holds."""

    step: jax.Array  # int32, steps taken
    params: dict[str, Any]  # nested, float32, frozen ones included
    opt_state: Any
    ema: Flat | None  # average of the trainable parameters, None where it is off
    teacher: dict[str, Any] | None = None  # parameters of the teacher, nested; None without one


def split(params: Mapping[str, Any], trainable: Iterable[str]) -> tuple[Flat, Flat]:
    """Flat trainable and flat frozen part of nested parameters."""
    flat = flatten(params)
    chosen = set(trainable)
    return (
        {name: leaf for name, leaf in flat.items() if name in chosen},
        {name: leaf for name, leaf in flat.items() if name not in chosen},
    )


def merge(trainable: Flat, frozen: Flat) -> dict[str, Any]:
    """Inverse of `split`."""
    return unflatten({**trainable, **frozen})


def create_state(
    params: dict[str, Any],
    optimizer: optax.GradientTransformation,
    trainable: Sequence[str],
    ema: bool,
    teacher: dict[str, Any] | None = None,
) -> TrainState:
    """State before the first step; traceable, so that it can be made in place on a mesh."""
    trained, _ = split(params, trainable)
    # A copy: the step donates the state, and one buffer cannot be donated twice.
    average = jax.tree.map(jnp.copy, trained) if ema else None
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(trained), average, teacher)


def update_ema(ema: Flat | None, params: Flat, decay: float | int | None) -> Flat | None:
    """Exponential moving average `decay * ema + (1 - decay) * params`."""
    if ema is None or decay is None:
        return None
    return jax.tree.map(lambda old, new: old * decay + new * (1.0 - decay), ema, params)


def evaluation_params(state: TrainState) -> dict[str, Any]:
    """Parameters to evaluate with: the average where there is one."""
    if state.ema is None:
        return state.params
    return unflatten({**flatten(state.params), **state.ema})
