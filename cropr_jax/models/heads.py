"""Heads by the name that configs use (`model.head`)."""

from collections.abc import Mapping
from typing import Any

from cropr_jax.host.messages import check_choice
from cropr_jax.models.classifier import Classifier
from cropr_jax.models.segmenter import Segmenter
from cropr_jax.models.trunk import Trunk

HEADS: dict[str, type[Trunk]] = {"classification": Classifier, "segmentation": Segmenter}
# What a config that names no head has.
DEFAULT = "classification"


def head_of(config: Mapping[str, Any]) -> type[Trunk]:
    """The class of a model's head.

    Args:
      config: of the model; `head` names it.

    Raises:
      ConfigError: on an unknown name.
    """
    name = config.get("head") or DEFAULT
    return HEADS[check_choice("model.head", name, HEADS)]
