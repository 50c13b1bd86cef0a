"""Models that prune without having been trained to: which methods can, and their variants."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cropr_jax import models
from cropr_jax.bench import spec
from cropr_jax.convert import architecture
from cropr_jax.convert.load import open_source
from cropr_jax.core import trees
from cropr_jax.core.fusion import POOLED_FUSIONS
from cropr_jax.errors import ConfigError, ScheduleError
from cropr_jax.models import Trunk
from cropr_jax.reducers.registry import REDUCERS

INVERSE = "_inverse"  # suffix of a method that keeps what it would prune


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row: method as the table names it, schedule, R, and what becomes of pruned tokens."""

    reduction: str = "none"
    schedule: str = "per_block"
    rate: int = 0
    fusion: str = "none"

    def fields(self) -> dict[str, Any]:
        """`reduction` of a model config."""
        name = self.reduction.removesuffix(INVERSE)
        options = dict(REDUCERS[name].untrained) if name in REDUCERS else {}
        return {
            "name": name,
            "schedule": self.schedule,
            "rate": self.rate,
            "fusion": self.fusion,
            "options": options | ({"inverse": True} if name != self.reduction else {}),
        }

    def draws(self) -> bool:
        """Whether one seed is not the whole answer."""
        name = self.reduction.removesuffix(INVERSE)
        return name in REDUCERS and REDUCERS[name].draws


def model_fields(path: Path, heads: int, size: tuple[int, int] | None) -> dict[str, Any]:
    """The model config that weights belong to.

    Args:
      path: of a whole CLS-pooled ViT.
      heads: attention heads; 0 for those that the width implies.
      size: (height, width) of images, None for that of the weights.

    Raises:
      ConfigError: if they are of another model, or the heads cannot be known.
    """
    source, _ = open_source(str(path), heads or None)
    fields = architecture.model_fields(source)
    if fields["pool"] != "cls" or not fields["num_classes"]:
        raise ConfigError(f"--weights: '{path}' is no whole ViT with CLS, its last norm and head")
    return fields | ({"image_size": size} if size else {})


def parameter_free(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Registered methods that bring no parameters, each with its inverse if it has one.

    Args:
      fields: of the unpruned model.
    """
    # Sites are alike: two blocks have one.
    small = dict(fields) | {"depth": 2}

    def leaves(variant: Variant) -> set[str]:
        model = models.create(small | {"reduction": variant.fields()})
        return set(trees.flatten(models.abstract_params(model)))

    plain, found = leaves(Variant()), []
    for name, method in sorted(REDUCERS.items()):
        if leaves(Variant(name)) == plain:
            found.append(name)
            if "inverse" in method.__dataclass_fields__:
                found.append(name + INVERSE)
    return tuple(found)


def plan(
    fields: Mapping[str, Any],
    reductions: Sequence[str],
    rates: Sequence[tuple[str, int]],
    fusions: Sequence[str] = POOLED_FUSIONS,
) -> tuple[dict[Variant, Trunk], dict[Variant, str]]:
    """All rows, the unpruned one first, then by schedule, method and fusion.

    A method that refuses Last Layer Fusion has no row with it, unless nothing else is asked for.

    Args:
      fields: of the unpruned model.
      reductions: methods by the names of the table.
      rates: (schedule, R) pairs.
      fusions: 'llf', 'none' or both.

    Returns:
      The models of those that can be, and why the others cannot: schedules that the method cannot
      meet.

    Raises:
      ConfigError: on a wrong name, or a schedule that no method can meet.
    """
    base = models.create(fields)
    made, unreachable = {Variant(): base}, {}
    for schedule, rate in rates:
        for fusion in fusions:
            models.make_schedule(
                schedule,
                rate,
                depth=base.depth,
                patches=base.patches,
                prefix=base.prefix,
                fusion=fusion == "llf",
            )
        for name in reductions:
            for fusion in fusions:
                variant = Variant(name, schedule, rate, fusion)
                asked = dict(fields) | {"reduction": variant.fields()}
                if "none" in fusions and spec.fit_fusion(asked) != asked:
                    continue
                try:
                    made[variant] = models.create(asked)
                except ScheduleError as error:
                    unreachable[variant] = str(error)
    return made, unreachable
