"""AdamW with layer-wise decay, masks by regex, freezing, clipping and an average of parameters.

Everything here works on flat dictionaries `{'block_0/attn/out/kernel': array}` of the *trainable*
parameters: a frozen parameter never enters, so it has no moments and no gradient.

Sources: `benbergner/cropr: cls/utils.py` (`param_groups_lrd`), MAE's `lr_decay.py`, torch's AdamW
(decoupled decay, scaled by the same learning rate).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util

from cropr_jax.errors import ConfigError

T = TypeVar("T")
Rules = Sequence[tuple[str, T]]
Flat = dict[str, jax.Array]

# Which parameters are decayed (1) and which not (0). By name, not by rank: torch's rule "axes > 1"
# would decay our attention biases [h, hd] and would spare a vector that stands for a matrix.
# The queries are decayed in the released code, where they have three axes.
WEIGHT_DECAY: Rules[float] = (
    (r"cls|pos_embed", 0.0),
    (r"(.*/)?(bias|scale|gamma)", 0.0),
    (r"(.*/)?(kernel|queries|query|centres)", 1.0),
)

# The group whose rate is decayed most; block i comes i + 1 groups later.
STEM = r"(cls|pos_embed|patch_embed)(/.*)?"


def match(names: Iterable[str], rules: Rules[T], what: str) -> dict[str, T]:
    """Value of the first rule whose regex matches the whole name, for every name.

    Args:
      names: '/'-joined parameter names.
      rules: pairs (regex, value), tried in order.
      what: what the values are, for the message.

    Raises:
      ConfigError: naming the first parameter that no rule covers.
    """
    compiled = [(re.compile(pattern), value) for pattern, value in rules]
    found = {}
    for name in names:
        for pattern, value in compiled:
            if pattern.fullmatch(name):
                found[name] = value
                break
        else:
            raise ConfigError(
                f"no rule for the {what} of parameter '{name}': add one to "
                f"{[pattern for pattern, _ in rules]}"
            )
    return found


def flatten(params: Mapping[str, Any]) -> dict[str, Any]:
    """Nested parameters to `{'a/b': leaf}`."""
    return traverse_util.flatten_dict(params, sep="/")


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `flatten`."""
    return traverse_util.unflatten_dict(dict(flat), sep="/")


def trainable_names(names: Iterable[str], freeze: Sequence[str]) -> tuple[str, ...]:
    """Names that no regex of `freeze` matches as a whole, sorted.

    Raises:
      ConfigError: if a regex matches nothing (a slip of the pen would train what was to be
        frozen), or if nothing is left to train.
    """
    names = sorted(names)
    frozen: set[str] = set()
    for pattern in freeze:
        hit = {name for name in names if re.fullmatch(pattern, name)}
        if not hit:
            raise ConfigError(
                f"config.optimizer.freeze: '{pattern}' matches no parameter; names are like "
                f"'{names[0]}' and '{names[-1]}', and the whole name must match"
            )
        frozen |= hit
    left = tuple(name for name in names if name not in frozen)
    if not left:
        raise ConfigError(f"config.optimizer.freeze = {tuple(freeze)} leaves no parameter to train")
    return left


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


def depth_of(names: Iterable[str]) -> int:
    """Number of blocks, read off the names `block_0/...` up."""
    blocks = [int(m.group(1)) for name in names if (m := re.match(r"block_(\d+)/", name))]
    return max(blocks, default=-1) + 1


def layer_multipliers(names: Iterable[str], depth: int, decay: float) -> dict[str, float]:
    """Factor on the learning rate of each parameter, `decay ** (depth + 1 - group)`.

    Group 0 is the stem (class token, position and patch embedding), block i (from 0) is group
    i + 1, all else (norms, head, everything of the reducers) is group depth + 1, factor 1.
    """
    groups: Rules[int] = (
        (STEM, 0),
        *((rf"block_{i}/.*", i + 1) for i in range(depth)),
        (r"(?!block_\d).*", depth + 1),
    )
    found = match(names, groups, "layer-wise learning-rate decay")
    return {name: decay ** (depth + 1 - group) for name, group in found.items()}


def scale_by_tree(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Multiplies each update by its own constant; keeps no state."""

    def update(updates, state, params=None):
        del params
        return {name: leaf * factors[name] for name, leaf in updates.items()}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def adamw(
    names: Sequence[str],
    depth: int,
    schedule: Callable[[Any], jax.Array],
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.05,
    layer_decay: float = 1.0,
    clip_norm: float | None = None,
    decay_rules: Rules[float] = WEIGHT_DECAY,
) -> optax.GradientTransformation:
    """AdamW as the released code sets it up, on a flat dictionary of trainable parameters.

    The step is `-lr(t) * layer_factor * (adam + weight_decay * parameter)`: the decay is decoupled
    and scaled by the same rate, and the layer factor multiplies the whole schedule, floor included.

    Args:
      names: trainable parameters.
      depth: blocks of the model.
      schedule: learning rate by step, from 0.
      betas: decay rates of the two moments.
      eps: added to the root of the second moment.
      weight_decay: decay of a parameter whose rule gives 1.
      layer_decay: ratio of the learning rates of neighbouring blocks.
      clip_norm: global norm that gradients are scaled down to, None for no clipping.
      decay_rules: which parameters are decayed; must cover every name.

    Raises:
      ConfigError: naming the parameter that a rule list does not cover.
    """
    decayed = {k: bool(v) for k, v in match(names, decay_rules, "weight decay").items()}
    factors = layer_multipliers(names, depth, layer_decay)
    clip = [optax.clip_by_global_norm(clip_norm)] if clip_norm is not None else []
    return optax.chain(
        *clip,
        optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=eps),
        optax.add_decayed_weights(weight_decay, mask=decayed),
        scale_by_tree(factors),
        optax.scale_by_learning_rate(schedule),
    )


class TrainState(NamedTuple):
    """All that a step changes, and all that a checkpoint holds."""

    step: jax.Array  # int32, steps taken
    params: dict[str, Any]  # nested, float32, frozen ones included
    opt_state: Any
    ema: Flat | None  # average of the trainable parameters, None where it is off
    teacher: dict[str, Any] | None = None  # parameters of the teacher, nested; None without one


def create_state(
    params: dict[str, Any],
    optimizer: optax.GradientTransformation,
    trainable: Sequence[str],
    ema: bool,
    teacher: dict[str, Any] | None = None,
) -> TrainState:
    """State before the first step; traceable, so that it can be made in place on a mesh."""
    chosen, _ = split(params, trainable)
    # A copy: the step donates the state, and one buffer cannot be donated twice.
    average = jax.tree.map(jnp.copy, chosen) if ema else None
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(chosen), average, teacher)


def update_ema(ema: Flat | None, params: Flat, decay: float | None) -> Flat | None:
    """Exponential moving average `decay * ema + (1 - decay) * params`."""
    if ema is None or decay is None:
        return None
    return jax.tree.map(lambda old, new: old * decay + new * (1.0 - decay), ema, params)


def evaluation_params(state: TrainState) -> dict[str, Any]:
    """Parameters to evaluate with: the average where there is one."""
    if state.ema is None:
        return state.params
    return unflatten({**flatten(state.params), **state.ema})
