"""Weights in timm's names and PyTorch's layout, and the authors' Cropr modules, into our tree.

MAE, timm and benbergner/cropr share the names of the backbone. Letters: d width, h heads, k head
width.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cropr_jax.core import trees
from cropr_jax.errors import ConfigError

Arrays = Mapping[str, np.ndarray]


class UnknownName(ConfigError):
    """A name that no parameter here has."""


# Names of the authors' Cropr module (benbergner/cropr: cls/cropr.py) and ours, without the site.
CROPR_NAMES = {
    "cross_attn.queries": "scorer/queries",
    "cross_attn.attn_norm": "scorer/norm",
    "cross_attn.q": "scorer/query",
    "cross_attn.k": "scorer/key",
    "cross_attn.v": "aggregator/value",
    "cross_attn.proj": "aggregator/out",
    "cross_attn.mlp_norm": "aggregator/norm",
    "cross_attn.mlp.fc1": "aggregator/mlp/fc1",
    "cross_attn.mlp.fc2": "aggregator/mlp/fc2",
    "head.norm": "auxiliary_head/norm",
    "head.head": "auxiliary_head/linear",
}


def _leaf(name: str, kind: str, value: np.ndarray) -> tuple[str, np.ndarray]:
    """Our leaf and layout of a PyTorch weight or bias, by its rank."""
    if kind == "bias":
        return f"{name}/bias", value
    if value.ndim == 4:
        return f"{name}/kernel", value.transpose(2, 3, 1, 0)
    if value.ndim == 2:
        return f"{name}/kernel", value.T
    return f"{name}/scale", value


def _attention(block: str, name: str, kind: str, value: np.ndarray, heads: int):
    """Leaves of `attn.qkv` (fused, head-major inside q, k and v) and `attn.proj`."""
    width = value.shape[0] if name == "proj" else value.shape[0] // 3
    head_width = width // heads
    if name == "proj":
        if kind == "bias":
            yield f"{block}/attn/out/bias", value
        else:
            yield f"{block}/attn/out/kernel", value.T.reshape(heads, head_width, width)
        return
    for part, rows in zip(("query", "key", "value"), np.split(value, 3), strict=True):
        if kind == "bias":
            yield f"{block}/attn/{part}/bias", rows.reshape(heads, head_width)
        else:
            kernel = rows.reshape(heads, head_width, width).transpose(2, 0, 1)
            yield f"{block}/attn/{part}/kernel", kernel


def _convert(name: str, value: np.ndarray, heads: int):
    """(our name, array) for each leaf that a PyTorch entry becomes."""
    if name == "cls_token":
        yield "cls", value
    elif name == "pos_embed":
        yield "pos_embed", value
    elif match := re.fullmatch(r"blocks\.(\d+)\.attn\.(qkv|proj)\.(weight|bias)", name):
        yield from _attention(f"block_{match[1]}", match[2], match[3], value, heads)
    elif match := re.fullmatch(r"blocks\.(\d+)\.ls([12])\.gamma", name):
        yield f"block_{match[1]}/layer_scale{match[2]}/gamma", value
    elif match := re.fullmatch(r"blocks\.(\d+)\.(norm[12]|mlp\.fc[12])\.(weight|bias)", name):
        yield _leaf(f"block_{match[1]}/{match[2].replace('.', '/')}", match[3], value)
    elif match := re.fullmatch(r"cropr\.(\d+)\.(.+)", name):
        yield cropr_leaf(f"reducer_{match[1]}/", match[2], value)
    elif match := re.fullmatch(r"(patch_embed)\.proj\.(weight|bias)", name):
        yield _leaf(match[1], match[2], value)
    elif match := re.fullmatch(r"(norm|fc_norm|head)\.(weight|bias)", name):
        yield _leaf(match[1], match[2], value)
    else:
        raise UnknownName(f"weights: {name!r} is no parameter of a timm ViT or of Cropr")


# Names of timm's EVA-02 block and ours, where they differ from a ViT's.
EVA02_NAMES = {
    "attn.q_proj": "attn/query",
    "attn.k_proj": "attn/key",
    "attn.v_proj": "attn/value",
    "attn.q_bias": "attn/query/bias",
    "attn.v_bias": "attn/value/bias",
    "mlp.fc1_g": "mlp/gate",
    "mlp.fc1_x": "mlp/up",
    "mlp.norm": "mlp/norm",
    "mlp.fc2": "mlp/down",
    "gamma_1": "layer_scale1/gamma",
    "gamma_2": "layer_scale2/gamma",
}


def is_eva02(state_dict: Arrays) -> bool:
    """Whether a timm state dict is an EVA-02's: its MLPs are gated.

    The two halves of a gated MLP have names of their own (B, L) or are packed into one `fc1`, of
    twice as many rows as `fc2` has columns (Ti, S).

    Raises:
      ConfigError: if it is of EVA-01 or of an EVA-02-CLIP tower, which compute something else.
    """
    for name in state_dict:
        if re.fullmatch(r"blocks\.\d+\.attn\.(norm|inner_attn_ln)\.(weight|bias)", name):
            raise ConfigError(
                f"weights: {name!r} shows an EVA-02-CLIP tower, which normalises inside its "
                "attention; only plain EVA-02 can be loaded (MIM or fine-tuned, without CLIP)"
            )
    if "blocks.0.mlp.fc1_g.weight" in state_dict:
        return True
    fc1, fc2 = (state_dict.get(f"blocks.0.mlp.fc{i}.weight") for i in (1, 2))
    if fc1 is not None and fc2 is not None and fc1.ndim == fc2.ndim == 2:
        if fc1.shape[0] == 2 * fc2.shape[1]:
            return True
    for name in state_dict:
        if re.fullmatch(r"blocks\.\d+\.(gamma_[12]|attn\.[qv]_bias)", name):
            raise ConfigError(
                f"weights: {name!r} beside an MLP that is not gated shows an EVA-01 or a BEiT; of "
                "these families only EVA-02 can be loaded"
            )
    return False


def eva02_leaves(name: str, value: np.ndarray, heads: int) -> Iterator[tuple[str, np.ndarray]]:
    """(our name, array) for what an EVA-02 holds in a block under a name that no ViT has there.

    Yields nothing for all other names. Packed projections come apart: `qkv` into three (it has no
    bias: keys have none), `fc1` into gate, which stands first, and up.

    Source: timm `models/eva.py`, `layers/mlp.py`.
    """
    match = re.fullmatch(r"blocks\.(\d+)\.(.+?)(?:\.(weight|bias))?", name)
    if not match:
        return
    block, module, kind = f"block_{match[1]}", match[2], match[3]
    if module == "mlp.fc1" and kind:
        for part, rows in zip(("gate", "up"), np.split(value, 2), strict=True):
            yield _leaf(f"{block}/mlp/{part}", kind, rows)
    elif module in EVA02_NAMES:
        target = f"{block}/{EVA02_NAMES[module]}"
        if kind is None:
            yield target, value.reshape(heads, -1) if target.endswith("bias") else value
        elif not module.startswith("attn."):
            yield _leaf(target, kind, value)
        elif kind == "bias":
            yield f"{target}/bias", value.reshape(heads, -1)
        else:
            kernel = value.reshape(heads, -1, value.shape[1]).transpose(2, 0, 1)
            yield f"{target}/kernel", kernel


def leaves(name: str, value: np.ndarray, heads: int, gated: bool) -> dict[str, np.ndarray]:
    """What one entry of a state dict becomes: arrays by our name, views wherever that can be.

    Args:
      name: timm's.
      value: in PyTorch's layout.
      heads: of the backbone.
      gated: whether the state dict `is_eva02`.

    Raises:
      UnknownName: if no ViT, EVA-02 or Cropr module has such an entry.
      ConfigError: if its shape is none that such an entry may have.
    """
    try:
        eva02 = dict(eva02_leaves(name, value, heads)) if gated else {}
        return eva02 or dict(_convert(name, value, heads))
    except ConfigError:
        raise
    except (ValueError, IndexError) as error:
        raise ConfigError(
            f"weights: {name!r} has shape {value.shape}, which it has in no model of {heads} heads"
        ) from error


def cropr_leaf(prefix: str, name: str, value: np.ndarray) -> tuple[str, np.ndarray]:
    """Our name and layout of one entry of the authors' Cropr module.

    Raises:
      ConfigError: if the module has no such entry.
    """
    if name == "cross_attn.queries":
        return prefix + CROPR_NAMES[name], value[0]
    module, _, kind = name.rpartition(".")
    if module not in CROPR_NAMES or kind not in ("weight", "bias"):
        raise UnknownName(f"weights: {name!r} is no parameter of a Cropr module")
    return _leaf(prefix + CROPR_NAMES[module], kind, value)


def from_state_dict(state_dict: Arrays, heads: int) -> dict[str, Any]:
    """Our parameter tree, with whatever leaves the state dict holds.

    Args:
      state_dict: arrays under timm's names; linear weights are [out, in], kernels [d, 3, ph, pw].
      heads: attention heads of the backbone.

    Raises:
      ConfigError: on a name that is none of timm's ViT and EVA-02 or of the authors' Cropr, and on
        the relatives of EVA-02 that compute something else.
    """
    flat = {}
    gated = is_eva02(state_dict)
    for name, value in state_dict.items():
        flat.update(leaves(name, np.asarray(value), heads, gated))
    return trees.unflatten(flat)


def check_match(params: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuses parameters that are not exactly those of a model.

    Args:
      params: a tree of arrays.
      expected: the model's tree, of arrays or shapes (`models.abstract_params`).

    Raises:
      ConfigError: naming the first missing, unused or misshapen leaf.
    """
    found = trees.flatten(params)
    wanted = trees.flatten(expected)
    for name in wanted:
        if name not in found:
            raise ConfigError(f"weights: {name} is missing")
        if found[name].shape != wanted[name].shape:
            raise ConfigError(
                f"weights: {name} has shape {found[name].shape}, the model needs "
                f"{wanted[name].shape}"
            )
    for name in found:
        if name not in wanted:
            raise ConfigError(f"weights: {name} is not a parameter of the model")


def params_from_state_dict(state_dict: Arrays, model: Any) -> dict[str, Any]:
    """Parameters of `model` from a state dict that matches it exactly.

    Raises:
      ConfigError: on any name or shape that differs.
    """
    from cropr_jax import models

    params = from_state_dict(state_dict, model.heads)
    check_match(params, models.abstract_params(model))
    return params
