"""Which models a benchmark times, and in which stages."""

import dataclasses
from collections.abc import Mapping, Sequence

from cropr_jax import models
from cropr_jax.bench import spec
from cropr_jax.bench.programs import differs
from cropr_jax.errors import ConfigError
from cropr_jax.models import Trunk
from cropr_jax.reducers.registry import OF_FUSIONS, REDUCERS


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a group of methods is timed.

    Attributes:
      reductions: methods, by the names of configs, or as `spec.with_reduction` takes them.
      batch_size: images of a call; 0 takes each method's best.
      precision: 'float32' or 'bfloat16'.
      attention: 'auto', 'xla' or 'cudnn'.
      rounds: of the interleaved measurement.
      stages: what is timed of each, of `programs.STAGES`.
    """

    reductions: tuple[str, ...] = ("none", "random", "cropr")
    batch_size: int = 0
    precision: str = "float32"
    attention: str = "auto"
    rounds: int = 15
    stages: tuple[str, ...] = ("slim",)


def create(config: str, reduction: str, settings: Settings) -> Trunk:
    """The training form of a method's model, without Last Layer Fusion if the method refuses it.

    Raises:
      ConfigError: if there is no such model.
    """
    fields = spec.with_reduction(
        spec.model_fields(config),
        reduction,
        dtype=settings.precision,
        attention=settings.attention,
    )
    return models.create(spec.fit_fusion(fields))


def create_all(config: str, settings: Settings) -> dict[str, Trunk]:
    """The training forms of all methods that are timed, by name; raises as `create`."""
    return {name: create(config, name, settings) for name in settings.reductions}


def every_method(config: str, settings: Settings) -> tuple[tuple[str, ...], dict[str, str]]:
    """'none' and every method, and why some cannot be timed.

    Returns:
      Names of those that can, and reasons by name of those that the model or its schedule refuses.

    Raises:
      ConfigError: if none can.
    """
    base = create(config, "none", settings)
    names = [*REDUCERS]
    names += [name for name in OF_FUSIONS if name in base.fusions]
    made, refused = ["none"], {}
    for name in names:
        try:
            create(config, name, settings)
            made.append(name)
        except ConfigError as error:
            refused[name] = str(error)
    if len(refused) == len(names):
        raise ConfigError(next(iter(refused.values())))
    return tuple(made), refused


def entrants(made: Mapping[str, Trunk], stages: Sequence[str]) -> list[tuple[str, str]]:
    """Methods with their stages; one in which a method is the slim form is timed as that, once."""
    return [
        (name, stage)
        for name, model in made.items()
        for stage in dict.fromkeys(s if differs(model, s) else "slim" for s in stages)
    ]
