"""Models by name, their parameters, and their slim inference form."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cropr_jax import fusion as fusions
from cropr_jax import schedule as schedules
from cropr_jax.errors import ConfigError, ScheduleError
from cropr_jax.models import eva02
from cropr_jax.models.blocks import MLPS, POOLS
from cropr_jax.models.segmenter import Segmenter
from cropr_jax.models.vit import VARIANTS, ViT
from cropr_jax.reducers.base import Reducer
from cropr_jax.reducers.registry import OF_FUSIONS, REDUCERS, method
from cropr_jax.schedule import Schedule

SCHEDULES = ("per_block", "three_stage", "aggressive")
# By the name that configs use: variants, and the attributes in which all of them differ from ViT.
ARCHITECTURES = {"vit": (VARIANTS, {}), "eva02": (eva02.VARIANTS, eva02.DEFAULTS)}
HEADS = {"classification": ViT, "segmentation": Segmenter}
NEEDED = ("width", "depth", "heads", "patch", "image_size", "num_classes")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def pair(value: Any) -> tuple[int, int]:
    """(height, width) from one int or two."""
    if isinstance(value, int):
        return value, value
    height, width = value
    return int(height), int(width)


def choose(field: str, value: str, options: Any) -> str:
    """`value`, if it is one of `options`.

    Raises:
      ConfigError: naming the field and the options otherwise.
    """
    if value not in options:
        expected = ", ".join(map(repr, options))
        raise ConfigError(f"config.{field}: found {value!r}, expected one of {expected}")
    return value


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
      ConfigError: on an unknown name.
      ScheduleError: if the schedule cannot be met; the message names the block.
    """
    choose("model.reduction.schedule", name, SCHEDULES)
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
      ConfigError: on an unknown architecture or variant, or a field that nothing sets.
    """
    given = {field: value for field, value in config.items() if value is not None}
    name = choose("model.name", given.pop("name", "vit"), ARCHITECTURES)
    variants, fields = ARCHITECTURES[name]
    variant = given.pop("variant", None)
    if variant:
        fields = fields | dataclasses.asdict(variants[choose("model.variant", variant, variants)])
    fields = fields | given
    for field in NEEDED:
        if field not in fields:
            raise ConfigError(
                f"config.model.{field} is missing: set it, or model.variant (one of "
                f"{', '.join(map(repr, variants))})"
            )
    return fields


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


def check_positions(model: ViT, reducer: Reducer) -> None:
    """Refuses fusion and rotary embeddings with methods that cannot serve them.

    Raises:
      ConfigError: naming the field.
    """
    if model.fusion != "none" and reducer.refuses_fusion:
        instead = "another method" if isinstance(model, Segmenter) else "'none'"
        raise ConfigError(
            f"config.model.reduction.fusion: {model.reduction!r} {reducer.refuses_fusion}, so "
            f"pruned tokens cannot be put back; use {instead}"
        )
    if model.rope_reference is not None and not reducer.keeps_positions:
        raise ConfigError(
            f"config.model.reduction.name: {model.reduction!r} keeps no positions, which the "
            "rotary embeddings of this model need; use another method, or a plain ViT"
        )


def check_caps(model: ViT, reducer: Reducer, rate: int, remake: Callable[[int], Schedule]) -> None:
    """Refuses a schedule that removes more at a site than the method can.

    Args:
      model: with the schedule.
      reducer: of any site.
      rate: R of the schedule.
      remake: the same schedule with another rate.

    Raises:
      ScheduleError: naming the block, and the largest rate that every site can meet.
    """
    patches = model.grid[0] * model.grid[1]

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


def check_queries(fields: dict[str, Any], grid: tuple[int, int]) -> None:
    """Sets the queries of a model that predicts at every patch: one for each.

    Args:
      fields: of the model.
      grid: (h, w) of the patches.

    Raises:
      ConfigError: if others were asked for.
    """
    patches = grid[0] * grid[1]
    if fields.setdefault("num_queries", patches) != patches:
        raise ConfigError(
            f"config.model.num_queries: found {fields['num_queries']}, but with "
            f"head='segmentation' each query predicts one of the {patches} patches; leave it out"
        )


def choose_reduction(reduction: Mapping[str, Any], head: str) -> tuple[str, str]:
    """Method and fusion of a config.

    Args:
      reduction: of the config.
      head: of the model.

    Raises:
      ConfigError: on an unknown name, or two that do not go together.
    """
    field = "model.reduction.fusion"
    fusion = choose(field, reduction.get("fusion", "llf"), fusions.FUSIONS)
    name = reduction.get("name", fusion if fusion in OF_FUSIONS else "none")
    if name not in OF_FUSIONS:
        choose("model.reduction.name", name, ("none", *sorted(REDUCERS)))
    if (name in OF_FUSIONS or fusion in OF_FUSIONS) and name != fusion:
        brings, found = (fusion, name) if fusion in OF_FUSIONS else (name, fusion)
        raise ConfigError(
            f"config.model.reduction: the fusion {brings!r} prunes by its own heads' confidence, "
            f"so that it goes with no other method and its method with no other fusion, found "
            f"{found!r}; leave out the name, or set both to {brings!r}"
        )
    if head == "classification" and fusion not in fusions.POOLED_FUSIONS:
        raise ConfigError(
            f"config.{field}: {fusion!r} restores the image for a head that predicts at every "
            "patch (model.head='segmentation'); for classification use 'llf' or 'none'"
        )
    if name == "none" and fusion not in fusions.POOLED_FUSIONS:
        raise ConfigError(
            f"config.model.reduction.name: found 'none', which prunes nothing that {fusion!r} "
            "could put back; set a method, or leave out the fusion"
        )
    if name != "none" and head == "segmentation" and fusion == "none":
        expected = ", ".join(map(repr, fusions.DENSE_FUSIONS))
        raise ConfigError(
            f"config.{field}: found 'none', but head='segmentation' predicts at pruned patches "
            f"too; expected one of {expected}"
        )
    return name, fusion


def create(config: Mapping[str, Any]) -> ViT:
    """The model that a config describes.

    Args:
      config: plain values. `name` ('vit', 'eva02'); `variant` ('ti', 's', 'b', 'l' or, of ViT, 'h')
        or `width`, `depth` and `heads`; `patch`, `image_size`, `num_classes`; optionally `head`
        ('classification', 'segmentation' for a `cropr_jax.models.segmenter.Segmenter`),
        `reduction` = {name, schedule, rate, fusion, options} and any other attribute of
        `cropr_jax.models.vit.ViT`. None means the default.

    Raises:
      ConfigError: on a wrong field, an impossible schedule, or a combination that cannot work.
    """
    fields = complete(config)
    head = choose("model.head", fields.pop("head", "classification"), HEADS)
    patch, image_size = pair(fields.pop("patch")), pair(fields.pop("image_size"))
    if image_size[0] % patch[0] or image_size[1] % patch[1]:
        raise ConfigError(
            f"config.model.image_size: {image_size} is not a multiple of the patch {patch}"
        )
    grid = image_size[0] // patch[0], image_size[1] // patch[1]
    fields["dtype"] = DTYPES[choose("model.dtype", fields.get("dtype", "float32"), DTYPES)]
    pool = choose("model.pool", fields.setdefault("pool", "mean_all"), POOLS)
    choose("model.mlp", fields.get("mlp", "gelu"), MLPS)
    if "rope_reference" in fields:
        fields["rope_reference"] = pair(fields["rope_reference"])
    prefix = fields.get("prefix", 1)

    reduction: dict[str, Any] = dict(fields.pop("reduction", {}))
    # Configs read from JSON have lists; models, which JAX caches by, must be hashable.
    options = {
        option: tuple(value) if isinstance(value, list) else value
        for option, value in reduction.get("options", {}).items()
    }
    check_heads(fields, options)
    name, fusion = choose_reduction(reduction, head)
    if head == "segmentation":
        check_queries(fields, grid)
    remake = functools.partial(
        make_schedule,
        reduction.get("schedule", "per_block"),
        depth=fields["depth"],
        patches=grid[0] * grid[1],
        prefix=prefix,
        fusion=fusion != "none",
    )
    schedule = Schedule(fields["depth"]) if name == "none" else remake(reduction["rate"])
    try:
        model = HEADS[head](
            image_size=image_size,
            patch=patch,
            schedule=schedule,
            reduction=name,
            reducer=tuple(sorted(options.items())),
            fusion=fusion,
            **fields,
        )
        reducer = model.make_reducer() if name != "none" else None
        needs_cls = reducer is not None and reducer.needs_cls
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.model: {error}") from error
    if not prefix and (pool == "cls" or needs_cls):
        raise ConfigError(
            f"config.model.prefix: pool {pool!r} with {name!r} needs a CLS token, found 0"
        )
    if reducer is not None:
        check_positions(model, reducer)
        check_caps(model, reducer, reduction["rate"], remake)
    return model


def _example(model: ViT) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros((1, *model.image_size, 3)), jax.random.split(jax.random.key(0), 1)


def init(model: ViT, key: jax.Array) -> dict[str, Any]:
    """All parameters of the model, float32; the training form unless the model is slim."""
    images, keys = _example(model)
    train = not model.slim
    variables = jax.jit(lambda: model.init(key, images, train=train, keys=keys))()
    return variables["params"]


@functools.lru_cache(maxsize=64)
def _abstract_params(model: ViT) -> dict[str, Any]:
    return jax.eval_shape(lambda: init(model, jax.random.key(0)))


def abstract_params(model: ViT) -> dict[str, Any]:
    """Shapes and dtypes of all parameters, without computing anything.

    Tracing a large model takes seconds, and many ask: that is done once for each.
    """
    known = _abstract_params(model)  # pyright: ignore[reportArgumentType] -- flax modules do hash
    return jax.tree.map(lambda leaf: leaf, known)


def slim(model: ViT, params: Mapping[str, Any]) -> tuple[ViT, dict[str, Any]]:
    """The inference form of a model: no auxiliary parameters, one query per site.

    Returns:
      The model with `slim` set, and its parameters. Logits and kept sets are those of `model`.
    """
    if model.slim:
        return model, dict(params)
    return model.clone(slim=True), slim_params(model, params)


def slim_params(model: ViT, params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the slim model; works on arrays and under `jax.eval_shape`."""
    slimmed = {}
    for name, value in params.items():
        if name.startswith("reducer_"):
            value = method(model.reduction).slim_params(value)
        slimmed[name] = value
    return slimmed


def unpruned(model: ViT) -> ViT:
    """The same backbone and head without reducers, fusion and drop path."""
    return model.clone(
        reduction="none",
        reducer=(),
        schedule=Schedule(model.depth),
        fusion="none",
        drop_path=0.0,
        drop_path_last_block=0.0,
    )


def count(params: Any) -> int:
    """Number of parameters in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


__all__ = [
    "VARIANTS",
    "Segmenter",
    "ViT",
    "abstract_params",
    "count",
    "create",
    "init",
    "make_schedule",
    "slim",
    "slim_params",
    "unpruned",
]
