"""Parameters to start from: fresh ones, with a file's weights over those that it holds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from cropr_jax import models
from cropr_jax.convert.load import Loaded, load
from cropr_jax.errors import ConfigError
from cropr_jax.models.vit import ViT
from cropr_jax.train.optimizer import flatten, unflatten


def check_path(path: str, field: str = "config.init") -> None:
    """Refuses a file or directory that is not there; addresses are tried when they are read.

    Raises:
      ConfigError: naming it and the field.
    """
    if path and "://" not in path and not Path(path).expanduser().exists():
        raise ConfigError(
            f"{field}: '{path}' does not exist; expected a file of weights (.npz, .safetensors "
            "or .pth), or a work or step directory of a run"
        )


def fresh_params(model: ViT, key: jax.Array, names: Iterable[str]) -> dict[str, jax.Array]:
    """Flat parameters of these names as `models.init` makes them; no others are kept in memory."""
    names = tuple(names)
    if not names:
        return {}

    def make() -> dict[str, jax.Array]:
        every = flatten(models.init(model, key))
        return {name: every[name] for name in names}

    return jax.jit(make)()


def initial_params(
    path: str, model: ViT, key: jax.Array, resampling: str = "timm"
) -> tuple[dict[str, Any], list[str]]:
    """Parameters for the first step, and what to tell the user about them.

    The file is read and compared before anything is compiled.

    Args:
      path: of weights (`convert.load`), or '' for none.
      model: training form.
      key: for what is fresh.
      resampling: 'timm' or 'torch', the rule for positions and patch kernels.

    Raises:
      ConfigError: if they cannot be read, or are of another model.
    """
    if not path:
        return models.init(model, key), []
    loaded = _read("config.init", path, model, resampling)
    fresh = fresh_params(model, key, loaded.plan.fresh)
    return unflatten({**fresh, **loaded.params}), loaded.notes()


def teacher_params(
    path: str, teacher: ViT, resampling: str = "timm"
) -> tuple[dict[str, Any], list[str]]:
    """Parameters of a teacher, all of them from the file, and what to tell the user about them.

    Args:
      path: of weights (`convert.load`); reducers in them are left.
      teacher: unpruned.
      resampling: as for `initial_params`.

    Raises:
      ConfigError: if they cannot be read or are of another model; or lack something, be it the head
        alone: a fresh one teaches nothing.
    """
    loaded = _read("config.teacher", path, teacher, resampling)
    for name, why in loaded.plan.fresh.items():
        raise ConfigError(
            f"config.teacher: '{path}' has no '{name}' that fits ({why}); a teacher must be "
            f"trained for these {teacher.num_classes} classes and pool {teacher.pool!r}: give one "
            "that was fine-tuned with reduction=none"
        )
    return unflatten(loaded.params), loaded.notes()


def _read(field: str, path: str, model: ViT, resampling: str) -> Loaded:
    try:
        return load(path, model, resampling=resampling)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error
