"""Weights of any known file as parameters of a model, or one error that says all that differs.

A load may lack what weights never have for a new task: the head, the norm before it, and reducers.
Everything else must be there, and everything else in the file must be used.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import traverse_util

from cropr_jax import models
from cropr_jax.convert import files, resample, sources
from cropr_jax.convert.pickles import shown
from cropr_jax.convert.sources import Leaf, Source, listed
from cropr_jax.errors import ConfigError
from cropr_jax.models.vit import ViT
from cropr_jax.reducers.registry import REDUCERS

# Parameters that may start fresh, and those of a file that may be left.
OPTIONAL = ("reducer_", "head/", "fc_norm/", "norm/")
SITE = r"^(reducer_|cropr\.)\d+"
# Pages of the file are given back after this much, so that they do not add up to a second copy.
RELEASE = 64 << 20  # bytes
# Yields (name, array) of parameters by our names.
Reader = Callable[[Iterable[str]], Iterator[tuple[str, np.ndarray]]]
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


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Parameters from a file.

    Attributes:
      params: '/'-joined names to float32 arrays of the model's shapes; what is fresh is missing.
      kind: of the file, see `sources`.
      plan: what was done with it.
    """

    params: dict[str, np.ndarray]
    kind: str
    plan: Plan

    def notes(self) -> list[str]:
        """What the user should know, a phrase each."""
        notes = list(self.plan.resized.values())
        for what, names in (("fresh", self.plan.fresh), ("left", self.plan.dropped)):
            if names:
                notes.append(f"{what}: {_by_module(names)}")
        return notes


def _by_module(names: Mapping[str, str]) -> str:
    """Modules of names with reasons, all sites of a reducer as one."""
    sites = {why for name, why in names.items() if re.match(SITE, name)}
    modules: dict[str, str] = {}
    for name, why in names.items():
        module = re.sub(r"[/.][^/.]*$", "", re.sub(SITE, r"\1*", name))
        if len(sites) == 1:
            module = re.sub(r"^(reducer_|cropr\.)\*.*", r"\1*", module)
        # The shape of a kernel says more than that of its bias.
        if module not in modules or name.endswith(("kernel", "weight")):
            modules[module] = why
    return listed((f"{name} ({why})" for name, why in modules.items()), 16)


def load(path: str, model: ViT, *, resampling: str = "timm") -> Loaded:
    """Parameters of `model` from a file of weights or a directory of checkpoints.

    Positions and patch kernel are resampled to the model's grid and patch. Of a directory only what
    the model needs is read.

    Args:
      path: see `files.read`; or a work or step directory of a run.
      model: in its training form.
      resampling: 'timm' or 'torch', see `resample`.

    Raises:
      ConfigError: if the file cannot be read, is of no known kind or another model, with all names
        that are missing, unused or of another shape, or holds numbers that are not finite.
    """
    resample.check_rule(resampling)
    if model.slim and model.reduction != "none":
        raise ConfigError("load: takes the training form of a pruned model; make it slim after")
    wanted = traverse_util.flatten_dict(models.abstract_params(model), sep="/")
    shapes = {name: leaf.shape for name, leaf in wanted.items()}
    source, reader = open_source(path, model.heads)
    try:
        check_counts(source, model)
        plan = match(source, shapes, model.grid)
        params = {
            name: fit(name, array, shapes[name], source, model.grid, resampling)
            for name, array in reader(plan.taken)
        }
    except ConfigError as error:
        raise ConfigError(f"'{path}': {error}") from error
    return Loaded(params, source.kind, plan)


def open_source(path: str, heads: int | None = None) -> tuple[Source, Reader]:
    """What a file or directory holds, and a function that reads parameters of it.

    Args:
      path: as for `load`.
      heads: as for `sources.recognise`.

    Returns:
      The source, and `(names) -> iterator of (name, array)`; arrays may be views of the file that
      are valid until the next one.
    """
    if "://" not in path and Path(path).expanduser().is_dir():
        return _open_directory(Path(path).expanduser())
    weights = files.read(path)
    try:
        source = sources.recognise(weights.arrays, heads, weights.metadata)
    except ConfigError as error:
        raise ConfigError(f"'{path}': {error}") from error

    def read(names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        seen = 0
        for name in names:
            leaf = source.leaves[name]
            yield name, _checked(leaf.source, leaf.array)
            seen += leaf.array.nbytes
            if seen > RELEASE:
                weights.release()
                seen = 0

    return source, read


def _open_directory(path: Path) -> tuple[Source, Reader]:
    from cropr_jax.train import checkpoints

    stored = traverse_util.flatten_dict(checkpoints.stored_params(path), sep="/")
    leaves = {name: Leaf(name, leaf, leaf.shape) for name, leaf in stored.items()}
    source = Source("cropr_jax", leaves, {}, grid=_grid_of_run(path))

    def read(names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        import jax

        wanted = {n: jax.ShapeDtypeStruct(stored[n].shape, stored[n].dtype) for n in names}
        tree = checkpoints.restore_params(path, traverse_util.unflatten_dict(wanted, sep="/"))
        flat = traverse_util.flatten_dict(tree, sep="/")
        del tree
        for name in list(flat):
            yield name, _checked(name, np.asarray(flat.pop(name)))

    return source, read


def _grid_of_run(path: Path) -> tuple[int, int] | None:
    """Grid of the model that a run trained, if its config is there."""
    path = path.absolute()
    for folder in (path, path.parent.parent):
        if (folder / "config.json").is_file():
            fields = models.complete(json.loads((folder / "config.json").read_text())["model"])
            size, patch = models.pair(fields["image_size"]), models.pair(fields["patch"])
            return size[0] // patch[0], size[1] // patch[1]
    return None


def _checked(name: str, array: np.ndarray) -> np.ndarray:
    """A copy in memory, dense and float32.

    Raises:
      ConfigError: if it is of integers, or not finite.
    """
    if array.dtype.kind != "f" and array.dtype != ml_dtypes.bfloat16:
        raise ConfigError(f"weights: {shown(name)} is of {array.dtype}, expected real numbers")
    with np.errstate(over="ignore"):  # told below
        array = np.array(array, np.float32, order="C")
    files.check_finite(name, array)
    return array


def match(
    source: Source, shapes: Mapping[str, tuple[int, ...]], grid: tuple[int, int] | None
) -> Plan:
    """Compares a file with a model by names and shapes alone.

    Args:
      source: of the file.
      shapes: of the model's parameters, by name.
      grid: the model's.

    Raises:
      ConfigError: with all that differs and may not.
    """
    taken, resized, fresh, missing, misshapen = [], {}, {}, [], []
    for name, shape in shapes.items():
        leaf = source.leaves.get(name)
        there = None if leaf is None else tuple(leaf.array.shape)
        if leaf is not None and (there == shape or _resizable(name, there, shape)):
            taken.append(name)
            if note := _resize_note(name, there, shape, source, grid):
                resized[name] = note
        elif name.startswith(OPTIONAL):
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
        if name.startswith(OPTIONAL):
            dropped[leaf.source] = "not in the model"
        else:
            unused.append(shown(leaf.source))
            extra.append(name)
    problems = [
        f"{what}: {listed(names)}"
        for what, names in (
            ("missing in the file", missing),
            ("unused in the file", list(dict.fromkeys(unused))),
            ("of another shape", misshapen),
        )
        if names
    ]
    if problems:
        hint = _hint(missing, extra, source)
        raise ConfigError(
            f"weights of kind {source.kind!r} are not those of the model: {'; '.join(problems)}"
            + hint
        )
    return Plan(tuple(taken), resized, fresh, dropped)


def check_counts(source: Source, model: ViT) -> None:
    """Refuses reducers that were trained to leave another number of tokens than the model's.

    Starting afresh would throw their training away without a word of why.

    Args:
      source: of the file.
      model: with the schedule.

    Raises:
      ConfigError: naming the site and both numbers.
    """
    axes = {} if model.reduction == "none" else REDUCERS[model.reduction].count_axes
    left = model.schedule.patches(model.grid[0] * model.grid[1])
    for site, (block, count) in enumerate(zip(model.schedule.blocks, left, strict=True)):
        for name, axis in axes.items():
            leaf = source.leaves.get(f"reducer_{site}/{name}")
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
    return ""


def source_grid(source: Source, grid: tuple[int, int]) -> tuple[int, int]:
    """(h, w) of the file's position table.

    Foreign files do not tell it: a table that can be square is, else it must be the model's.

    Args:
      source: of the file.
      grid: the model's.

    Raises:
      ConfigError: if it cannot be known.
    """
    entries = source.leaves["pos_embed"].array.shape[1]
    if source.grid is not None and source.grid[0] * source.grid[1] == entries - source.prefix:
        return source.grid
    same = entries - source.prefix == grid[0] * grid[1]
    if same and source.kind == "cropr_jax":
        return grid
    try:
        return resample.square_grid(entries, source.prefix)
    except ConfigError:
        if same:
            return grid
        raise


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
    elif array.shape != shape:
        return resample.resample_kernel(array, (shape[0], shape[1]), rule)
    return array
