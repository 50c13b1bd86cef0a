"""Plain Vision Transformers: their variants.

Sources: Dosovitskiy et al. 2021, Table 1; Touvron et al. 2021 for Ti and S.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class ViTSpec:
    """What tells the variants of an architecture apart; `Anatomy` has the same names."""

    width: int
    depth: int
    heads: int
    patch: int
    mlp: str = "gelu"


VARIANTS = {
    "ti": ViTSpec(192, 12, 3, 16),
    "s": ViTSpec(384, 12, 6, 16),
    "b": ViTSpec(768, 12, 12, 16),
    "l": ViTSpec(1024, 24, 16, 16),
    "h": ViTSpec(1280, 32, 16, 14),
}

# Attributes of `cropr_jax.models.anatomy.Anatomy` unless a config says otherwise: its own defaults.
DEFAULTS: dict[str, Any] = {}
