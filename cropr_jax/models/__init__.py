"""Models by name, their parameters, and their slim inference form."""

from cropr_jax.core.trees import count
from cropr_jax.models.classifier import Classifier
from cropr_jax.models.create import complete, create, make_schedule, pair
from cropr_jax.models.fields import DTYPES
from cropr_jax.models.forward import forward
from cropr_jax.models.heads import HEADS, head_of
from cropr_jax.models.params import (
    abstract_params,
    cast_params,
    init,
    init_some,
    slim,
    slim_leaves,
    slim_params,
    unpruned,
)
from cropr_jax.models.segmenter import Segmenter
from cropr_jax.models.trunk import Trunk
from cropr_jax.models.vit import VARIANTS

__all__ = [
    "DTYPES",
    "HEADS",
    "VARIANTS",
    "Classifier",
    "Segmenter",
    "Trunk",
    "abstract_params",
    "cast_params",
    "complete",
    "count",
    "create",
    "forward",
    "head_of",
    "init",
    "init_some",
    "make_schedule",
    "pair",
    "slim",
    "slim_leaves",
    "slim_params",
    "unpruned",
]
