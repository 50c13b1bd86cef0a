"""From the names of two Flax code bases to our parameter tree.

google-research/vision_transformer (AugReg and the ViTs before it) and big_vision share a layout,
which is ours, and differ in numbers within the names. What they compute differs a little from us:
their GELU is the tanh approximation, and big_vision normalises before it averages, we after.

vision_transformer puts CLS in front before positions are added, so that its table has an entry for
it. big_vision adds it afterwards and has none: its table gets one of zeros.

Sources: google-research/vision_transformer: vit_jax/models_vit.py; google-research/big_vision:
big_vision/models/vit.py.
"""

import re
from collections.abc import Iterator, Mapping

import numpy as np

from cropr_jax.convert.timm import UnknownName
from cropr_jax.errors import ConfigError

PREFIX = r"(params|target|opt/target)/"
BLOCK = r"Transformer/encoderblock(?:_(\d{1,4}))?/(\w+?)(?:_(\d{1,4}))?/(.+)"
# Without a block: theirs and ours.
STEM = {
    "cls": "cls",
    "embedding": "patch_embed",
    "pos_embedding": "pos_embed",
    "Transformer/posembed_input/pos_embedding": "pos_embed",
    "Transformer/encoder_norm": "norm",
    "head": "head",
}
MLP = {"Dense_0": "fc1", "Dense_1": "fc2"}


def is_flax(names: Mapping[str, object]) -> bool:
    """Whether names are those of big_vision or vision_transformer."""
    return any("Transformer/encoderblock" in name for name in names)


def is_big_vision(names: Mapping[str, object]) -> bool:
    """Which of the two: the tables of positions have different names."""
    return not any(name.endswith("posembed_input/pos_embedding") for name in names)


def leaves(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """What one entry becomes: arrays by our name, views of it.

    Args:
      name: theirs, '/'-joined.
      value: in our layout; of blocks under one name (scan), stacked.

    Raises:
      UnknownName: if neither code base has such an entry in a ViT.
      ConfigError: on attention pooling, which no model here has.
    """
    name = re.sub(f"^{PREFIX}", "", name)
    if name.startswith("MAPHead_"):
        raise ConfigError(
            f"weights: {name!r} shows a ViT that pools by attention (MAP head), which no model "
            "here does; use weights that pool by CLS or mean"
        )
    return dict(_leaves(name, value))


def _leaves(name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    if match := re.fullmatch(BLOCK, name):
        block, module, number, rest = match.groups()
        target = _in_block(name, module, int(number or 0), rest)
        if block is not None:
            yield f"block_{block}/{target}", value
        elif not value.size or not value.ndim:
            raise ConfigError(f"weights: {name!r} of shape {value.shape} holds no stack of blocks")
        else:
            yield from ((f"block_{i}/{target}", part) for i, part in enumerate(value))
        return
    module, _, kind = name.rpartition("/")
    if name in STEM:
        yield STEM[name], value
    elif module in STEM and kind in ("kernel", "scale", "bias"):
        yield f"{STEM[module]}/{kind}", value
    else:
        raise UnknownName(f"weights: {name!r} is no parameter of a Flax ViT")


def _in_block(name: str, module: str, number: int, rest: str) -> str:
    """Our name within a block; numbers count norms (big_vision) or all modules (the other)."""
    if module == "LayerNorm" and number in (0, 1, 2):
        return f"norm{1 if number == 0 else 2}/{rest}"
    if module == "MultiHeadDotProductAttention":
        return f"attn/{rest}"
    part, _, kind = rest.partition("/")
    if module == "MlpBlock" and part in MLP:
        return f"mlp/{MLP[part]}/{kind}"
    raise UnknownName(f"weights: {name!r} is no parameter of a Flax ViT")
