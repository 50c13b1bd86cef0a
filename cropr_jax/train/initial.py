"""Parameters to start from: fresh ones, with a file's weights over those that it holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cropr_jax import models
from cropr_jax.convert.timm import from_state_dict, resample_positions, square_grid
from cropr_jax.errors import ConfigError
from cropr_jax.models.vit import ViT
from cropr_jax.train import checkpoints
from cropr_jax.train.optimizer import flatten, unflatten

# Modules of our model that a foreign file need not hold, and those of a file that we may leave.
FRESH = ("reducer_", "head/", "fc_norm/", "norm/")


def check_path(path: str) -> None:
    """Refuses a file or directory that is not there.

    Raises:
      ConfigError: naming it.
    """
    if path and not Path(path).expanduser().exists():
        raise ConfigError(
            f"config.init: '{path}' does not exist; expected a .npz of timm's names, or a work or "
            "step directory of a run"
        )


def read(path: str, model: ViT) -> dict[str, Any]:
    """Flat parameters of a file, on the host.

    Args:
      path: `.npz` with arrays under timm's names, or a directory of checkpoints.
      model: to tell attention heads apart.

    Raises:
      ConfigError: if it is neither, or holds names of another kind of model.
    """
    place = Path(path).expanduser()
    if place.suffix == ".npz":
        with np.load(place) as arrays:
            return flatten(from_state_dict(dict(arrays), model.heads))
    if place.is_dir():
        stored = checkpoints.stored_params(place)
        wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), stored)
        return flatten(jax.device_get(checkpoints.restore_params(place, wanted)))
    raise ConfigError(f"config.init: '{path}' is neither a .npz nor a directory of checkpoints")


def overlay(
    fresh: Mapping[str, Any], found: Mapping[str, Any], path: str
) -> tuple[dict[str, Any], list[str]]:
    """Fresh parameters with a file's over them.

    Taken from the file is what has the same name and shape. Head, last norm and reducers may be
    missing or of another shape: they stay fresh (a head for other classes is swapped this way).

    Args:
      fresh: flat arrays or shapes of the model.
      found: flat arrays of the file.
      path: for the message.

    Returns:
      Flat arrays to be put over the fresh ones, and the modules that stay fresh.

    Raises:
      ConfigError: naming the first backbone parameter that is missing or of another shape.
    """
    taken, left = {}, {}
    for name, leaf in fresh.items():
        if name in found and found[name].shape == leaf.shape:
            taken[name] = np.asarray(found[name], leaf.dtype)
        elif name.startswith(FRESH):
            why = f"{tuple(found[name].shape)} there" if name in found else "not in the file"
            module = re.sub(r"^reducer_\d+", "reducer_*", name.rpartition("/")[0])
            left.setdefault(module, why)
        else:
            there = f"has shape {found[name].shape}" if name in found else "is missing"
            raise ConfigError(
                f"config.init: '{name}' {there} in '{path}', expected shape {leaf.shape}"
            )
    return taken, [f"{name} ({why})" for name, why in left.items()]


def fit_positions(flat: dict[str, Any], model: ViT) -> list[str]:
    """Resamples the file's position embedding to the model's grid, in place.

    Returns:
      What to tell the user, if anything was done.
    """
    table = flat.get("pos_embed")
    height, width = model.grid
    if table is None or table.shape[1] == model.prefix + height * width:
        return []
    source = square_grid(table, model.prefix)
    flat["pos_embed"] = resample_positions(table, model.grid, model.prefix, source)
    return [f"positions resampled from {source[0]} x {source[1]} to {height} x {width}"]


def initial_params(path: str, model: ViT, key: jax.Array) -> tuple[dict[str, Any], list[str]]:
    """Parameters for the first step, and what to tell the user about them."""
    if not path:
        return models.init(model, key), []
    found = read(path, model)
    notes = fit_positions(found, model)
    taken, left = overlay(flatten(models.abstract_params(model)), found, path)
    if left:
        notes.append(f"fresh: {', '.join(left)}")
    return unflatten({**flatten(models.init(model, key)), **taken}), notes
