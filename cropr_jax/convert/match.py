"""Whether a file's parameters are a model's: all that differs in one error, or how they become so.

A load may lack what weights never have for a new task: the head, the norm before it, reducers, and
the block of a fusion.
Everything else must be there, and everything else in the file must be used.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from cropr_jax.convert import resample
from cropr_jax.convert.messages import listed, shown
from cropr_jax.convert.sources import Source
from cropr_jax.core import trees
from cropr_jax.errors import ConfigError
from cropr_jax.models import Trunk
from cropr_jax.reducers.registry import method

# Queries that may be one for each patch: resampled as positions are, if they are.
QUERIES = rf"({trees.SITE}\d+/scorer|fusion)/queries"
# What a mismatch in a name usually means: missing in the file, unused in it.
HINTS = (
    (r"cls", "the weights have no CLS token: prefix=0", "the weights have {count} prefix tokens"),
    (r"block_\d+/layer_scale", "the weights have no LayerScale", "set layer_scale to any number"),
    (r"block_\d+/mlp/(gate|up|down)", "the weights are no EVA-02", "they are an EVA-02's"),
    (r"block_\d+/mlp/norm", "set mlp='swiglu'", "set mlp='swiglu_norm'"),
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a file's parameters become a model's.

    Attributes:
      taken: our names that the file has, in the model's order.
      resized: of those, what is resampled and how, for the user.
      fresh: our names that it lacks, and why.
      dropped: its names that the model does not use, and why.
    """

    taken: tuple[str, ...]
    resized: dict[str, str]
    fresh: dict[str, str]
    dropped: dict[str, str]


def match(
    source: Source,
    shapes: Mapping[str, tuple[int, ...]],
    grid: tuple[int, int] | None,
    optional: tuple[str, ...],
) -> Plan:
    """Compares a file with a model by names and shapes alone.

    Args:
      source: of the file.
      shapes: of the model's parameters, by name.
      grid: the model's.
      optional: how names begin that may start fresh, and of which a file may have more
        (`Trunk.fresh`).

    Raises:
      ConfigError: with all that differs and may not.
    """
    taken, resized, fresh, missing, misshapen = [], {}, {}, [], []
    for name, shape in shapes.items():
        leaf = source.leaves.get(name)
        there = None if leaf is None else tuple(leaf.array.shape)
        if leaf is not None and (
            there == shape
            or _resizable(name, there, shape)
            or _query_grid(name, there, shape, source, grid)
        ):
            taken.append(name)
            if note := _resize_note(name, there, shape, source, grid):
                resized[name] = note
        elif name.startswith(optional):
            fresh[name] = "not in the file" if leaf is None else f"{there} there"
        elif leaf is None:
            missing.append(name)
        else:
            misshapen.append(f"{name} is {there} there, expected {shape}")
    dropped = dict(source.left)
    unused = list(map(shown, source.unknown))
    extra = []
    for name, leaf in source.leaves.items():
        if name in shapes:
            continue
        if name.startswith(optional):
            dropped[leaf.source] = "not in the model"
        else:
            unused.append(shown(leaf.source))
            extra.append(name)
    _refuse(
        {
            "missing in the file": missing,
            "unused in the file": list(dict.fromkeys(unused)),
            "of another shape": misshapen,
        },
        _hint(missing, extra, source),
        source,
    )
    return Plan(tuple(taken), resized, fresh, dropped)


def _refuse(problems: Mapping[str, list[str]], hint: str, source: Source) -> None:
    """Raises one error with all problems, if there are any."""
    found = [f"{what}: {listed(names)}" for what, names in problems.items() if names]
    if found:
        raise ConfigError(
            f"weights of kind {source.kind!r} are not those of the model: {'; '.join(found)}{hint}"
        )


def check_counts(source: Source, model: Trunk) -> None:
    """Refuses reducers that were trained to leave another number of tokens than the model's.

    Starting afresh would throw their training away without a word of why.

    Args:
      source: of the file.
      model: with the schedule.

    Raises:
      ConfigError: naming the site and both numbers.
    """
    axes = {} if model.reduction == "none" else method(model.reduction).count_axes
    left = model.schedule.patches(model.patches)
    for site, (block, count) in enumerate(zip(model.schedule.blocks, left, strict=True)):
        for name, axis in axes.items():
            leaf = source.leaves.get(f"{trees.site_name(site)}/{name}")
            if leaf is not None and (found := leaf.array.shape[axis]) != count:
                raise ConfigError(
                    f"weights: site {site} (after block {block}) is trained to leave K = {found} "
                    f"patch tokens ({leaf.source}), with this schedule and image size it is to "
                    f"leave K = {count}; {model.reduction!r} holds K in its parameters: use the "
                    "schedule, the rate and the image size that it was trained with"
                )


def _hint(missing: list[str], extra: list[str], source: Source) -> str:
    for pattern, lacking, left in HINTS:
        for names, hint in ((missing, lacking), (extra, left)):
            if any(re.match(pattern, name) for name in names):
                return f" ({hint.format(count=source.prefix)})"
    return ""


def _resizable(name: str, there: Any, shape: tuple[int, ...]) -> bool:
    """Whether only the grid or the patch differs."""
    if len(there) != len(shape) or not min(there, default=0):
        return False
    if name == "pos_embed":
        return there[::2] == shape[::2]
    return name == "patch_embed/kernel" and there[2:] == shape[2:]


def _query_grid(
    name: str, there: Any, shape: tuple[int, ...], source: Source, grid: tuple[int, int] | None
) -> tuple[int, int] | None:
    """The (h, w) that queries of a file stand for, if they and the model's have a patch each."""
    if grid is None or not re.fullmatch(QUERIES, name) or "pos_embed" not in source.leaves:
        return None
    if len(there or ()) != 2 or there[1:] != shape[1:] or shape[0] != math.prod(grid):
        return None
    old = source_grid(source, grid)
    return old if there[0] == math.prod(old) else None


def _resize_note(
    name: str, there: Any, shape: tuple[int, ...], source: Source, grid: tuple[int, int] | None
) -> str:
    """What is to be told of a parameter that is resampled, '' if it is not."""
    if name == "patch_embed/kernel" and there != shape:
        return "patch kernel resampled from {} x {} to {} x {}".format(*there[:2], *shape[:2])
    if name == "pos_embed" and grid:
        old = source_grid(source, grid)
        if old != grid:
            return "positions resampled from {} x {} to {} x {}".format(*old, *grid)
    old = _query_grid(name, there, shape, source, grid)
    if old is not None and old != grid:
        return f"{name} resampled like them"
    return ""


def source_grid(source: Source, grid: tuple[int, int]) -> tuple[int, int]:
    """(h, w) of the file's position table.

    That which the file or the user tells. Foreign files do not tell it; all public ones were
    trained on square images, so that a table that can be square is, and one that cannot is the
    model's if it has as many entries. One that could be either is refused: 16 entries may be 4 x 4
    or 2 x 8 patches, 16 entries beside CLS 4 x 4 patches or, with one for CLS, 3 x 5.

    Args:
      source: of the file.
      grid: the model's.

    Raises:
      ConfigError: if it cannot be known, or is told wrong.
    """
    entries = source.leaves["pos_embed"].array.shape[1]
    patches = entries - source.prefix
    if source.grid is not None:
        if math.prod(source.grid) != patches:
            raise ConfigError(
                f"weights: pos_embed has {entries} entries, {source.prefix} of them for the "
                f"prefix; they are not those of the grid {source.grid[0]} x {source.grid[1]}"
            )
        return source.grid
    wanted = math.prod(grid)
    if patches == wanted and (source.kind == "cropr_jax" or math.isqrt(patches) ** 2 != patches):
        return grid
    square = resample.square_grid(entries, source.prefix)
    if square != grid and wanted in (patches, patches - source.padded):
        raise ConfigError(
            f"weights: pos_embed may be of {square[0]} x {square[1]} patches or of the model's "
            f"{grid[0]} x {grid[1]}, and the file does not say; write it down with python -m "
            f"cropr_jax.convert SRC DST --grid {square[0]}x{square[1]} (or {grid[0]}x{grid[1]})"
        )
    return square


def fit(
    name: str,
    array: np.ndarray,
    shape: tuple[int, ...],
    source: Source,
    grid: tuple[int, int],
    rule: str,
) -> np.ndarray:
    """A parameter in the model's shape: resampled if it is a table or kernel of another one."""
    if name == "pos_embed":
        old = source_grid(source, grid)
        if old != grid:
            return resample.resample_positions(array, grid, source.prefix, old, rule)
    elif old := _query_grid(name, array.shape, shape, source, grid):
        if old != grid:
            return resample.resample_positions(array[None], grid, 0, old, rule)[0]
    elif array.shape != shape:
        return resample.resample_kernel(array, (shape[0], shape[1]), rule)
    return array
