"""Routers after the fact: training the sites of a model that is there, and nothing else of it.

Nothing of a Cropr site sends a gradient into the backbone, and a frozen backbone needs no backward
pass: a step costs little more than a forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cropr_jax import models
from cropr_jax.core import trees
from cropr_jax.errors import ConfigError
from cropr_jax.models import Trunk

TRAIN = ("all", "routers")
TARGETS = ("labels", "model")
# Everything but the sites.
BACKBONE = rf"(?!{trees.SITE}).*"


def only(config: Mapping[str, Any]) -> bool:
    """Whether the routers alone are trained."""
    return config.get("train") == "routers"


def from_model(config: Mapping[str, Any]) -> bool:
    """Whether the targets are the predictions of the frozen model, run unpruned."""
    return config.get("targets") == "model"


def freeze(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Regexes of parameters that are not trained."""
    own = tuple(config["optimizer"].get("freeze") or ())
    return (*own, BACKBONE) if only(config) else own


def check(config: Mapping[str, Any], model: Trunk) -> None:
    """Refuses what cannot be trained in this way.

    Args:
      config: plain values.
      model: training form.

    Raises:
      ConfigError: naming the field.
    """
    if not only(config):
        if from_model(config):
            raise ConfigError(
                "config.targets: 'model' are the predictions of a frozen model, and train='all' "
                "freezes none: use 'labels', or train='routers'"
            )
        return
    if reason := _refusal(model):
        raise ConfigError(
            f"config.train: 'routers', but {model.reduction!r} {reason}; cropr can be trained so"
        )
    if not config.get("init"):
        raise ConfigError(
            "config.init: empty, but train='routers' keeps backbone and head as they are: give the "
            "weights or the work directory of a model that is trained for these classes"
        )
    if any(model.drop_rates()):
        raise ConfigError(
            f"config.model.drop_path: {model.drop_path}, last block {model.drop_path_last_block}, "
            "but a frozen backbone is to be as it is in evaluation: set both to 0"
        )


def _refusal(model: Trunk) -> str:
    """Why the method cannot be trained alone; empty if it can."""
    if model.reduction == "none":
        return "has no sites"
    if model.make_reducer().trains_alone:
        return ""
    if not any(map(trees.of_site, models.abstract_params(model))):
        return "has nothing to train: evaluate it in that model as it is (--mode eval)"
    return "learns from what later blocks make of its tokens and not by a loss of its sites alone"
