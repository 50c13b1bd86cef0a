"""The model that a config describes."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from cropr_jax.core import schedule as schedules
from cropr_jax.core.schedule import Schedule
from cropr_jax.errors import ConfigError, ScheduleError
from cropr_jax.host.messages import check_choice
from cropr_jax.models import checks
from cropr_jax.models import fields as model_fields
from cropr_jax.models.fields import ARCHITECTURES, DTYPES
from cropr_jax.models.heads import head_of
from cropr_jax.models.trunk import Trunk
from cropr_jax.reducers.registry import OF_FUSIONS, REDUCERS

NEEDED = ("width", "depth", "heads", "patch", "image_size", "num_classes")
# What the reduction of a config may leave out.
FUSION = "llf"


def pair(value: Any) -> tuple[int, int]:
    """(height, width) from one int or two."""
    if isinstance(value, int):
        return value, value
    height, width = value
    return int(height), int(width)


def make_schedule(
    name: str, rate: int, *, depth: int, patches: int, prefix: int, fusion: bool
) -> Schedule:
    """The schedule of a config, checked against the number of patches.

    Args:
      name: 'per_block', 'three_stage' or 'aggressive'.
      rate: R, tokens removed at a site.
      depth: number of blocks.
      patches: patch tokens at the start.
      prefix: prefix tokens.
      fusion: whether pruned tokens come back: then nothing is pruned after the last block but one.

    Raises:
      ScheduleError: if the schedule cannot be met; the message names the block.
    """
    try:
        if name == "per_block":
            made = schedules.per_block(depth, rate, prefix=prefix, fusion=fusion)
        elif name == "three_stage":
            made = schedules.three_stage(depth, rate, prefix=prefix, fusion=fusion)
        else:
            made = schedules.aggressive(depth, rate)
        made.patches(patches)
    except ValueError as error:
        raise ScheduleError(f"config.model.reduction (rate {rate}): {error}") from error
    return made


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of a model: those of the config over its variant's over its architecture's.

    Raises:
      ConfigError: on an unknown field, a value out of range, or a field that nothing sets.
    """
    model_fields.check(config)
    given = {field: value for field, value in config.items() if value is not None}
    name = given.pop("name", "vit")
    variants, fields = ARCHITECTURES[name].VARIANTS, dict(ARCHITECTURES[name].DEFAULTS)
    variant = given.pop("variant", None)
    if variant:
        fields = fields | dataclasses.asdict(
            variants[check_choice("model.variant", variant, variants)]
        )
    own = {field.name for field in dataclasses.fields(head_of(given))}
    fields = {field: value for field, value in fields.items() if field in own} | given
    for field in NEEDED:
        if field not in fields:
            raise ConfigError(
                f"config.model.{field} is missing: set it, or model.variant (one of "
                f"{', '.join(map(repr, variants))})"
            )
    return fields


def choose_reduction(reduction: Mapping[str, Any], head: type[Trunk]) -> tuple[str, str]:
    """Method and fusion of a config.

    Args:
      reduction: of the config.
      head: of the model.

    Raises:
      ConfigError: on an unknown method, or two that do not go together.
    """
    fusion = reduction.get("fusion", FUSION)
    name = reduction.get("name", fusion if fusion in OF_FUSIONS else "none")
    if name not in OF_FUSIONS:
        check_choice("model.reduction.name", name, ("none", *sorted(REDUCERS)))
    checks.check_fusion(name, fusion, head)
    return name, fusion


def create(config: Mapping[str, Any]) -> Trunk:
    """The model that a config describes.

    Args:
      config: plain values. `name` ('vit', 'eva02'); `variant` ('ti', 's', 'b', 'l' or, of ViT, 'h')
        or `width`, `depth` and `heads`; `patch`, `image_size`, `num_classes`; optionally `head`
        ('classification', 'segmentation' for a `cropr_jax.models.segmenter.Segmenter`),
        `reduction` = {name, schedule, rate, fusion, options} and any other attribute of
        `cropr_jax.models.anatomy.Anatomy`. None means the default.

    Raises:
      ConfigError: on a wrong field, an impossible schedule, or a combination that cannot work.
    """
    fields = complete(config)
    head = head_of(fields)
    fields.pop("head", None)
    grid = _set_sizes(fields)
    asked: Mapping[str, Any] = fields.pop("reduction", {})
    reduction = {name: value for name, value in asked.items() if value is not None}
    # Configs read from JSON have lists; models, which JAX caches by, must be hashable.
    options = {
        option: tuple(value) if isinstance(value, list) else value
        for option, value in reduction.get("options", {}).items()
    }
    checks.check_heads(fields, options)
    name, fusion = choose_reduction(reduction, head)
    head.check(fields, grid)
    remake = functools.partial(
        make_schedule,
        reduction.get("schedule", "per_block"),
        depth=fields["depth"],
        patches=grid[0] * grid[1],
        prefix=fields.get("prefix", 1),
        fusion=fusion != "none",
    )
    schedule = Schedule(fields["depth"]) if name == "none" else remake(reduction["rate"])
    made = fields | {
        "schedule": schedule,
        "reduction": name,
        "reducer_options": tuple(sorted(options.items())),
        "fusion": fusion,
    }
    try:
        model = head(**made)
        reducer = model.make_reducer() if name != "none" else None
        needs_cls = reducer is not None and reducer.needs_cls
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.model: {error}") from error
    checks.check_cls(model, needs_cls)
    if reducer is not None:
        checks.check_positions(model, reducer)
        checks.check_caps(model, reducer, reduction["rate"], remake)
    return model


def _set_sizes(fields: dict[str, Any]) -> tuple[int, int]:
    """Sizes, types and kinds of a config as a model has them, in place; returns the patch grid."""
    patch, image_size = pair(fields["patch"]), pair(fields["image_size"])
    if image_size[0] % patch[0] or image_size[1] % patch[1]:
        raise ConfigError(
            f"config.model.image_size: {image_size} is not a multiple of the patch {patch}"
        )
    dtype = DTYPES[fields.get("dtype", "float32")]
    fields |= {"patch": patch, "image_size": image_size, "dtype": dtype}
    if "rope_reference" in fields:
        fields["rope_reference"] = pair(fields["rope_reference"])
    return image_size[0] // patch[0], image_size[1] // patch[1]
