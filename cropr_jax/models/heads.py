"""Heads by the name that configs use (`model.head`)."""

from cropr_jax.models.classifier import Classifier
from cropr_jax.models.segmenter import Segmenter
from cropr_jax.models.trunk import Trunk

HEADS: dict[str, type[Trunk]] = {"classification": Classifier, "segmentation": Segmenter}
# What a config that names no head has.
DEFAULT = "classification"
