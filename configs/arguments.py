"""What follows the colon in `--config configs/in1k.py:vit_l,res=336`.

An optional variant first, then `key=value` pairs, a bare key meaning true.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from cropr_jax.core.fusion import POOLED_FUSIONS
from cropr_jax.errors import ConfigError
from cropr_jax.models.fields import SCHEDULES
from cropr_jax.reducers.registry import REDUCERS, options
from cropr_jax.train.routers import TRAIN

REDUCTIONS = ("none", *REDUCERS)

SHARED = {
    "reduction": "cropr",
    "schedule": "per_block",
    "r": -1,  # negative: the recipe's own
    # Empty: LLF, but none with schedule=aggressive, where the method refuses it, or where the last
    # block is frozen (train=routers), which has never met tokens of earlier blocks.
    "fusion": "",
    "res": 0,  # 0: the recipe's own
    "seed": 0,
    "distill": False,
    "train": "all",  # or the routers of a given model only: --config.init
    "runlocal": False,
}


def parse_arg(
    arg: str | None,
    variants: Sequence[str] = (),
    fusions: Sequence[str] = POOLED_FUSIONS,
    **defaults: Any,
) -> ConfigDict:
    """Arguments of a config, typed by their defaults.

    Args:
      arg: `variant,key=value,flag`, or None.
      variants: allowed first words; the first of them is the default. Empty: there is none.
      fusions: allowed values of `fusion`.
      **defaults: further keys beside the shared ones, or other defaults of those.

    Raises:
      ConfigError: on an unknown variant or key, or a value of another type.
    """
    values = SHARED | defaults
    words = [word for word in (arg or "").split(",") if word]
    parsed = ConfigDict(values)
    if variants:
        parsed.variant = variants[0]
        if words and "=" not in words[0] and words[0] not in values:
            parsed.variant = words.pop(0)
        if parsed.variant not in variants:
            raise ConfigError(
                f"--config variant: found {parsed.variant!r}, expected one of {list(variants)}"
            )
    for word in words:
        key, separator, text = word.partition("=")
        if key not in values:
            raise ConfigError(f"--config argument {key!r} is unknown; known are {sorted(values)}")
        parsed[key] = _typed(key, text if separator else "true", values[key])
    for key, allowed in (
        ("reduction", REDUCTIONS),
        ("schedule", SCHEDULES),
        ("fusion", (*fusions, SHARED["fusion"])),
        ("train", TRAIN),
    ):
        if parsed[key] not in allowed:
            raise ConfigError(f"--config {key}: found {parsed[key]!r}, expected one of {allowed}")
    able = [name for name in REDUCERS if "distill" in options(name)]
    if parsed.distill and parsed.reduction not in able:
        raise ConfigError(
            f"--config distill: {parsed.reduction!r} learns from no teacher, "
            f"{' and '.join(able)} can"
        )
    if not parsed.fusion:
        method = REDUCERS.get(parsed.reduction)
        refuses = parsed.schedule == "aggressive" or (method and method().refuses_fusion)
        parsed.fusion = "none" if refuses or parsed.train == "routers" else "llf"
    return parsed


def _typed(key: str, text: str, default: Any) -> Any:
    kind = type(default)
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"--config argument {key}: found {text!r}, expected a value of type {kind.__name__}"
        ) from error


def pick(key: str, name: str, choices: Mapping[str, Any]) -> Any:
    """The option called `name`.

    Raises:
      ConfigError: if there is none.
    """
    if name not in choices:
        raise ConfigError(f"--config {key}: found {name!r}, expected one of {sorted(choices)}")
    return choices[name]
