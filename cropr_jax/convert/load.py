"""Weights of any known file or checkpoint as parameters of a model, the whole or nothing."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from cropr_jax import models
from cropr_jax.convert import files, resample, sources
from cropr_jax.convert.match import Plan, check_counts, fit, match
from cropr_jax.convert.messages import listed, shown
from cropr_jax.convert.sources import Leaf, Source
from cropr_jax.core import trees
from cropr_jax.errors import ConfigError
from cropr_jax.models import Trunk

# A site, by our names and by those of the authors.
SITE = rf"^({trees.SITE}|cropr\.)\d+"
# Pages of the file are given back after this much, so that they do not add up to a second copy.
RELEASE = 64 << 20  # bytes
# Yields (name, array) of parameters by our names.
Reader = Callable[[Iterable[str]], Iterator[tuple[str, np.ndarray]]]


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
            module = re.sub(rf"^({trees.SITE}|cropr\.)\*.*", r"\1*", module)
        # The shape of a kernel says more than that of its bias.
        if module not in modules or name.endswith(("kernel", "weight")):
            modules[module] = why
    return listed((f"{name} ({why})" for name, why in modules.items()), 16)


def load(
    path: str, model: Trunk, *, resampling: str = "timm", grid: tuple[int, int] | None = None
) -> Loaded:
    """Parameters of `model` from a file of weights or a directory of checkpoints.

    Positions and patch kernel are resampled to the model's grid and patch. Of a directory only what
    the model needs is read.

    Args:
      path: see `files.read`; or a work or step directory of a run.
      model: in its training form.
      resampling: 'timm' or 'torch', see `resample`.
      grid: (h, w) of the file's position table, if it does not tell and is not square.

    Raises:
      ConfigError: if the file cannot be read, is of no known kind or another model, with all names
        that are missing, unused or of another shape, or holds numbers that are not finite.
    """
    resample.check_rule(resampling)
    if model.slim and model.reduction != "none":
        raise ConfigError("load: takes the training form of a pruned model; make it slim after")
    wanted = trees.flatten(models.abstract_params(model))
    shapes = {name: leaf.shape for name, leaf in wanted.items()}
    source, reader = open_source(path, model.heads, grid)
    try:
        check_counts(source, model)
        plan = match(source, shapes, model.grid, model.fresh)
        params = {
            name: fit(name, array, shapes[name], source, model.grid, resampling)
            for name, array in reader(plan.taken)
        }
    except ConfigError as error:
        raise ConfigError(f"'{path}': {error}") from error
    return Loaded(params, source.kind, plan)


def open_source(
    path: str, heads: int | None = None, grid: tuple[int, int] | None = None
) -> tuple[Source, Reader]:
    """What a file or directory holds, and a function that reads parameters of it.

    Args:
      path: as for `load`.
      heads: as for `sources.recognise`.
      grid: as for `load`.

    Returns:
      The source, and `(names) -> iterator of (name, array)`; arrays may be views of the file that
      are valid until the next one.
    """
    if "://" not in path and Path(path).expanduser().is_dir():
        return _open_directory(Path(path).expanduser(), grid)
    weights = files.read(path)
    try:
        source = sources.recognise(weights.arrays, heads, weights.metadata, grid)
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


def _open_directory(path: Path, grid: tuple[int, int] | None) -> tuple[Source, Reader]:
    from cropr_jax.runs import checkpoints, directory

    step = directory.step_directory(path)
    stored = trees.flatten(checkpoints.stored_params(step))
    leaves = {name: Leaf(name, leaf, leaf.shape) for name, leaf in stored.items()}
    source = Source("cropr_jax", leaves, {}, grid=sources.agreed(_grid_of_run(path), grid))

    def read(names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        import jax

        wanted = {n: jax.ShapeDtypeStruct(stored[n].shape, stored[n].dtype) for n in names}
        flat = trees.flatten(checkpoints.restore_params(step, trees.unflatten(wanted)))
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
