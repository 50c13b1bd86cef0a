"""Parameters to start from: fresh ones, with a file's weights over those that it holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from cropr_jax import models
from cropr_jax.convert.load import Loaded, load
from cropr_jax.core.trees import SITE, flatten, of_site, unflatten
from cropr_jax.errors import ConfigError
from cropr_jax.models import Trunk


def check_path(path: str, field: str = "config.init") -> None:
    """Refuses a file or directory that is not there; addresses are tried when they are read.

    Raises:
      ConfigError: naming it and the field.
    """
    if path and "://" not in path and not Path(path).expanduser().exists():
        of_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", path)
        hint = (
            f"; a file of the Hugging Face hub is named as in 'hf://{path}/model.safetensors'"
            if of_hub
            else ""
        )
        raise ConfigError(
            f"{field}: '{path}' does not exist; expected a file of weights (.npz, .safetensors "
            f"or .pth), or a work or step directory of a run{hint}"
        )


def initial_params(
    path: str, model: Trunk, key: jax.Array, resampling: str = "timm"
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
    fresh = flatten(models.init_some(model, key, loaded.plan.fresh))
    return unflatten({**fresh, **loaded.params}), loaded.notes()


def teacher_params(
    path: str, teacher: Trunk, resampling: str = "timm"
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
    _check_whole("config.teacher", path, loaded, teacher)
    return unflatten(loaded.params), loaded.notes()


def router_params(
    path: str, model: Trunk, key: jax.Array, resampling: str = "timm"
) -> tuple[dict[str, Any], list[str]]:
    """Parameters for the first step of training the routers of a model that is there.

    Auxiliary heads that the file has not start as copies of the model's own norm and head.

    Args:
      path, model, key, resampling: as for `initial_params`.

    Raises:
      ConfigError: if they cannot be read or are of another model; or lack more than reducers. That
        goes for training on labels too: they would teach the routers, but the head that the model
        ends with would stay as it was drawn.
    """
    loaded = _read("config.init", path, model, resampling)
    _check_whole("config.init", path, loaded, model)
    fresh = flatten(models.init_some(model, key, loaded.plan.fresh))
    copied = {}
    for name in fresh:
        if found := re.fullmatch(rf"{SITE}\d+/auxiliary_head/(norm|linear)/(\w+)", name):
            own = {"norm": model.head_norm, "linear": "head"}[found[1]]
            copied[name] = jnp.asarray(loaded.params[f"{own}/{found[2]}"])
    notes = loaded.notes() + (["auxiliary heads: copies of norm and head"] if copied else [])
    return unflatten({**fresh, **copied, **loaded.params}), notes


def _check_whole(field: str, path: str, loaded: Loaded, model: Trunk) -> None:
    """Refuses a file that lacks anything but reducers, of a model that is to stay as it is."""
    for name, why in loaded.plan.fresh.items():
        if not of_site(name):
            raise ConfigError(
                f"{field}: '{path}' has no '{name}' that fits ({why}), and none is trained here: "
                f"give a model that was trained for these {model.num_classes} classes with "
                f"the norm '{model.head_norm}' before its head"
            )


def _read(field: str, path: str, model: Trunk, resampling: str) -> Loaded:
    try:
        return load(path, model, resampling=resampling)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error
