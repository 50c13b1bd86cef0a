"""A tiny model's weights under the names of each kind of file."""

import re

import numpy as np
from conftest import random_params
from flax import traverse_util

from cropr_jax import models
from cropr_jax.convert.sources import EVA_NAMES
from cropr_jax.convert.timm import CROPR_NAMES
from cropr_jax.convert.to_timm import rename

VIT = {
    "width": 16,
    "depth": 2,
    "heads": 2,
    "patch": 4,
    "image_size": 16,
    "num_classes": 5,
    "pool": "mean_patches",
}


def without_pool(fields):
    """What a model of another head, or EVA-02 with its own pool, has of a ViT's fields."""
    return {name: value for name, value in fields.items() if name != "pool"}


EVA02 = without_pool(VIT) | {"name": "eva02"}
CROPR = {"reduction": {"name": "cropr", "rate": 3, "fusion": "none"}}


def made(fields, seed=0):
    """A model and flat random parameters as numpy arrays."""
    model = models.create(fields)
    flat = traverse_util.flatten_dict(random_params(model, seed), sep="/")
    return model, {name: np.array(leaf) for name, leaf in flat.items()}


def eva_names(state):
    """timm's names of EVA-02 -> those of its repository, with the buffers that it stores."""
    theirs = {ours: name for name, ours in EVA_NAMES.items()}
    renamed = {"rope.freqs_cos": np.ones((16, 8)), "rope.freqs_sin": np.ones((16, 8))}
    for name, value in state.items():
        match = re.fullmatch(r"(blocks\.\d+\.)mlp\.(\w+)(\.\w+)", name)
        if match:
            name = f"{match[1]}mlp.{theirs[match[2]]}{match[3]}"
        name = re.sub(r"attn\.([qv])_proj\.bias", r"attn.\1_bias", name)
        renamed[name] = value
        renamed["blocks.0.attn.rope.freqs_cos"] = np.ones((16, 8))
    return renamed


def cropr_names(flat):
    """Our flat parameters -> benbergner/cropr's names."""
    state = rename(flat)
    for theirs, ours in CROPR_NAMES.items():
        for name, value in flat.items():
            match = re.fullmatch(rf"reducer_(\d+)/{ours}(?:/(kernel|bias|scale))?", name)
            if match and match[2] is None:
                state[f"cropr.{match[1]}.{theirs}"] = value[None]
            elif match:
                kind = "bias" if match[2] == "bias" else "weight"
                state[f"cropr.{match[1]}.{theirs}.{kind}"] = value.T
    return state


def flax_names(flat, big_vision):
    """Our flat parameters of a ViT -> names of big_vision or of vision_transformer."""
    attention, norm2, mlp = ("0", "1", "0") if big_vision else ("1", "2", "3")
    blocks = {
        "norm1": "LayerNorm_0",
        "attn": f"MultiHeadDotProductAttention_{attention}",
        "norm2": f"LayerNorm_{norm2}",
        "mlp/fc1": f"MlpBlock_{mlp}/Dense_0",
        "mlp/fc2": f"MlpBlock_{mlp}/Dense_1",
    }
    stem = {"patch_embed": "embedding", "norm": "Transformer/encoder_norm", "head": "head"}
    renamed = {}
    for name, value in flat.items():
        match = re.fullmatch(r"block_(\d+)/(norm\d|attn|mlp/fc\d)/(.+)", name)
        module, _, kind = name.rpartition("/")
        if match:
            renamed[f"Transformer/encoderblock_{match[1]}/{blocks[match[2]]}/{match[3]}"] = value
        elif module in stem:
            renamed[f"{stem[module]}/{kind}"] = value
        elif name == "pos_embed":
            place = "pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"
            renamed[place] = value
        else:
            renamed[name] = value
    return {f"params/{k}": v for k, v in renamed.items()} if big_vision else renamed
