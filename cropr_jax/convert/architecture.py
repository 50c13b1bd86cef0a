"""The model that weights belong to, as far as names and shapes tell it."""

import re
from typing import Any

from cropr_jax.convert.resample import square_grid
from cropr_jax.convert.sources import Source
from cropr_jax.errors import ConfigError
from cropr_jax.models import eva02

NEEDED = (
    "pos_embed",
    "patch_embed/kernel",
    "block_0/attn/query/kernel",
    "block_0/attn/key/kernel",
)


def size(text: str) -> tuple[int, int]:
    """'224' -> (224, 224), '224x288' -> (224, 288): height and width of a command line."""
    height, _, width = text.partition("x")
    return int(height), int(width or height)


def model_fields(source: Source) -> dict[str, Any]:
    """The model config of a backbone and its head, for `models.create`; without reducers.

    The grid is taken to be square unless the file or the user tells it. Not told at all are the
    mean that is taken ('mean_patches' is assumed: timm, MAE and EVA-02) and EVA-02's reference grid
    (that of all public ones is assumed).

    Raises:
      ConfigError: if what tells a size is missing or of no possible shape.
    """
    shapes = {name: tuple(leaf.array.shape) for name, leaf in source.leaves.items()}
    gated = "block_0/mlp/gate/kernel" in shapes
    mlp = "block_0/mlp/gate/kernel" if gated else "block_0/mlp/fc1/kernel"
    for name in (*NEEDED, mlp):
        ranks = {"pos_embed": 3, "patch_embed/kernel": 4, mlp: 2}
        shape = shapes.get(name, ())
        if len(shape) != ranks.get(name, 3) or not min(shape):
            found = f"has shape {shape}" if name in shapes else "is missing"
            raise ConfigError(f"weights: '{name}', which tells the model's size, {found}")
    width, heads, _ = shapes["block_0/attn/query/kernel"]
    patch = shapes["patch_embed/kernel"][:2]
    grid = source.grid or square_grid(shapes["pos_embed"][1], source.prefix)
    fields: dict[str, Any] = {
        "name": "eva02" if gated else "vit",
        "width": width,
        "depth": 1
        + max(int(m[1]) for m in (re.match(r"block_(\d{1,4})/", n) for n in shapes) if m),
        "heads": heads,
        "mlp_ratio": _ratio(shapes[mlp][1], width),
        "use_key_bias": "block_0/attn/key/bias" in shapes,
        "layer_scale": 1.0 if "block_0/layer_scale1/gamma" in shapes else None,
        "patch": patch,
        "image_size": (grid[0] * patch[0], grid[1] * patch[1]),
        "num_classes": shapes.get("head/kernel", (0, 0))[-1],
        "prefix": source.prefix,
        "pool": "cls" if "norm/scale" in shapes and source.prefix else "mean_patches",
    }
    if gated:
        fields["mlp"] = "swiglu_norm" if "block_0/mlp/norm/scale" in shapes else "swiglu"
    return fields


def _ratio(hidden: int, width: int) -> float:
    """A ratio that gives exactly this hidden width; the usual one where it does."""
    usual = eva02.DEFAULTS["mlp_ratio"]
    if int(usual * width) == hidden:
        return usual
    # Half a channel more than asked for: rounding down must not lose one.
    return hidden / width if int(hidden / width * width) == hidden else (hidden + 0.5) / width
