"""AdamW with layer-wise decay, masks by regex, freezing, clipping and an average of parameters.

Everything here works on flat dictionaries `{'block_0/attn/out/kernel': array}` of the *trainable*
parameters: a frozen parameter never enters, so it has no moments and no gradient.

Sources: `benbergner/cropr: cls/utils.py` (`param_groups_lrd`), MAE's `lr_decay.py`, torch's AdamW
(decoupled decay, scaled by the same learning rate).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import optax

from cropr_jax.core.barrier import barrier
from cropr_jax.errors import ConfigError

T = TypeVar("T")
Rules = Sequence[tuple[str, T]]

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


def trainable(names: Iterable[str], freeze: Sequence[str]) -> tuple[str, ...]:
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


def depth_of(names: Iterable[str]) -> int:
    """Number of blocks, read off the names `block_0/...` up."""
    blocks = [int(m.group(1)) for name in names if (m := re.match(r"block_(\d+)/", name))]
    return max(blocks, default=-1) + 1


def layer_multipliers(names: Iterable[str], depth: int, decay: float | int) -> dict[str, float]:
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
    learning_rate: Callable[[Any], jax.Array],
    *,
    betas: tuple[float | int, float | int] = (0.9, 0.999),
    eps: float | int = 1e-8,
    weight_decay: float | int = 0.05,
    layer_decay: float | int = 1.0,
    clip_norm: float | int | None = None,
    decay_rules: Rules[float] = WEIGHT_DECAY,
) -> optax.GradientTransformation:
    """AdamW as the released code sets it up, on a flat dictionary of trainable parameters.

    The step is `-lr(t) * layer_factor * (adam + weight_decay * parameter)`: the decay is decoupled
    and scaled by the same rate, and the layer factor multiplies all of that, the floor included.

    Args:
      names: trainable parameters.
      depth: blocks of the model.
      learning_rate: by step, from 0.
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
        optax.scale_by_learning_rate(lambda count: barrier(learning_rate(count))),
    )
