"""What a model's fields, its head and its reduction method must agree in."""

from collections.abc import Callable, Mapping
from typing import Any

from cropr_jax.core import fusion as fusions
from cropr_jax.core.reducer import Reducer
from cropr_jax.core.schedule import Schedule
from cropr_jax.errors import ConfigError, ScheduleError
from cropr_jax.models.trunk import Trunk
from cropr_jax.reducers.registry import OF_FUSIONS


def check_heads(fields: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuses heads that do not divide the width, of the blocks or of a reducer.

    Raises:
      ConfigError: naming the field.
    """
    width, heads = fields["width"], fields["heads"]
    for field, count in (("heads", heads), ("reduction.options.heads", options.get("heads", 1))):
        if count < 1 or width % count:
            raise ConfigError(
                f"config.model.{field}: {count} heads do not divide the width {width}"
            )
    if fields.get("rope_reference") and width // heads % 4:
        raise ConfigError(
            f"config.model.heads: rotary embeddings need a head width divisible by 4, found "
            f"{width // heads} ({width} over {heads} heads)"
        )


def check_positions(model: Trunk, reducer: Reducer) -> None:
    """Refuses fusion and rotary embeddings with methods that cannot serve them.

    Raises:
      ConfigError: naming the field.
    """
    if model.fusion != "none" and reducer.refuses_fusion:
        instead = "another method" if model.dense else "'none'"
        raise ConfigError(
            f"config.model.reduction.fusion: {model.reduction!r} {reducer.refuses_fusion}, so "
            f"pruned tokens cannot be put back; use {instead}"
        )
    if model.rope_reference is not None and not reducer.keeps_positions:
        raise ConfigError(
            f"config.model.reduction.name: {model.reduction!r} keeps no positions, which the "
            "rotary embeddings of this model need; use another method, or a plain Trunk"
        )


def check_caps(
    model: Trunk, reducer: Reducer, rate: int, remake: Callable[[int], Schedule]
) -> None:
    """Refuses a schedule that removes more at a site than the method can.

    Args:
      model: with the schedule.
      reducer: of any site.
      rate: R of the schedule.
      remake: the same schedule with another rate.

    Raises:
      ScheduleError: naming the block, and the largest rate that every site can meet.
    """
    patches = model.patches

    def excess(schedule: Schedule) -> tuple[int, int, int] | None:
        left = (patches, *schedule.patches(patches))
        for (block, removed), before in zip(schedule.sites, left, strict=False):
            if removed > reducer.most(before):
                return block, removed, before
        return None

    found = excess(model.schedule)
    if found is None:
        return
    block, removed, before = found
    largest = next(r for r in range(rate - 1, -1, -1) if excess(remake(r)) is None)
    raise ScheduleError(
        f"config.model.reduction (rate {rate}): at block {block} {model.reduction!r} can remove at "
        f"most {reducer.most(before)} of {before} patch tokens, not {removed}; the largest rate of "
        f"this schedule is {largest}"
    )


def check_cls(model: Trunk, of_reducer: bool) -> None:
    """Refuses a model without a CLS token where head or method need one.

    Args:
      model: any.
      of_reducer: whether the method does.

    Raises:
      ConfigError: naming the field.
    """
    needing = [model.needs_cls] if model.needs_cls else []
    needing += [repr(model.reduction)] if of_reducer else []
    if needing and not model.prefix:
        verb = "need" if len(needing) > 1 else "needs"
        raise ConfigError(
            f"config.model.prefix: {' and '.join(needing)} {verb} a CLS token, found 0"
        )


def check_fusion(name: str, fusion: str, head: type[Trunk]) -> None:
    """Refuses a method and a fusion, or a fusion and a head, that do not go together.

    Args:
      name: of the method, or 'none'.
      fusion: one of `cropr_jax.core.fusion.FUSIONS`.
      head: of the model.

    Raises:
      ConfigError: naming the field.
    """
    field = "config.model.reduction"
    if (name in OF_FUSIONS or fusion in OF_FUSIONS) and name != fusion:
        brings, found = (fusion, name) if fusion in OF_FUSIONS else (name, fusion)
        raise ConfigError(
            f"{field}: the fusion {brings!r} prunes by its own heads' confidence, "
            f"so that it goes with no other method and its method with no other fusion, found "
            f"{found!r}; leave out the name, or set both to {brings!r}"
        )
    expected = ", ".join(map(repr, head.fusions))
    if not head.dense and fusion not in head.fusions:
        raise ConfigError(
            f"{field}.fusion: {fusion!r} restores the image for a head that predicts at every "
            f"patch (model.head='segmentation'); expected one of {expected}"
        )
    if name == "none" and fusion not in fusions.POOLED_FUSIONS:
        raise ConfigError(
            f"{field}.name: found 'none', which prunes nothing that {fusion!r} could put back; "
            "set a method, or leave out the fusion"
        )
    if name != "none" and fusion not in head.fusions:
        raise ConfigError(
            f"{field}.fusion: found {fusion!r}, but this head predicts at pruned patches too; "
            f"expected one of {expected}"
        )
