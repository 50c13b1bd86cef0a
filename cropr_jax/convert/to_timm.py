"""From our parameter tree to timm's names, so that a backbone trained here runs in PyTorch.

    timm.create_model("vit_large_patch16_224", global_pool="avg", num_classes=1000)

takes the weights of a ViT with `pool='mean_patches'`, `global_pool='token'` those with 'cls'. timm
has no 'mean_all': a backbone trained with it loads, and its logits differ by what CLS adds to the
mean. Reducers have no place in timm and are left out; the backbone alone sees all tokens.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from cropr_jax import models
from cropr_jax.convert.timm import EVA02_NAMES, check_match
from cropr_jax.core import trees
from cropr_jax.errors import ConfigError
from cropr_jax.models import Trunk

EVA02_TO_TIMM = {ours: theirs for theirs, ours in EVA02_NAMES.items()}
KINDS = {"kernel": "weight", "scale": "weight", "bias": "bias"}


def to_timm(params: Mapping[str, Any], model: Trunk) -> dict[str, np.ndarray]:
    """The backbone of a model as a state dict of timm's ViT or EVA-02.

    EVA-02 with a norm in its MLPs (B, L) comes with separate projections, as in timm's models,
    without (Ti, S) with `qkv` and `fc1` fused.

    Args:
      params: nested parameters of the model, in either form.
      model: whose parameters they are.

    Returns:
      float32 arrays by timm's names, in PyTorch's layout.

    Raises:
      ConfigError: if they are not the model's.
    """
    expected = models.abstract_params(model)
    check_match(params, expected)
    return rename(trees.flatten(params))


def is_reducer(name: str) -> bool:
    """Whether a parameter belongs to a site and not to the backbone."""
    return trees.of_site(name)


def rename(flat: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """`to_timm` of flat parameters, whichever of a model they are; reducers are left out.

    Raises:
      ConfigError: on a name that no model here has, or a part of what timm fuses.
    """
    flat = {name: np.asarray(leaf) for name, leaf in flat.items() if not is_reducer(name)}
    gated = any(name.endswith("/mlp/gate/kernel") for name in flat)
    fused = not any(name.endswith("/mlp/norm/scale") for name in flat)
    made: dict[str, np.ndarray] = {}
    for name, value in flat.items():
        match = re.fullmatch(r"block_(\d+)/(.+)", name)
        if not match:
            made.update(_stem(name, value))
            continue
        block, rest = f"blocks.{match[1]}.", match[2]
        module, _, kind = rest.rpartition("/")
        parts = _fusion(rest, gated, fused)
        if parts is not None:
            theirs, ours = parts
            if rest == ours[0]:
                made[block + theirs] = _fuse(flat, f"block_{match[1]}/", ours)
        elif rest.startswith("layer_scale"):
            number = module[-1]
            made[block + (f"gamma_{number}" if gated else f"ls{number}.gamma")] = value
        elif gated and fused and rest in ("attn/query/bias", "attn/value/bias"):
            made[block + EVA02_TO_TIMM[rest]] = _torch_layout(rest, value)
        else:
            timm_module = EVA02_TO_TIMM.get(module, module) if gated else module
            timm_module = timm_module.replace("attn/out", "attn/proj").replace("/", ".")
            made[f"{block}{timm_module}.{KINDS[kind]}"] = _torch_layout(rest, value)
    return made


def _stem(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    if name == "cls":
        # timm tells registers from CLS.
        made = {"cls_token": value[:, :1]}
        return made | ({"reg_token": value[:, 1:]} if value.shape[1] > 1 else {})
    if name == "pos_embed":
        return {name: value}
    module, _, kind = name.rpartition("/")
    if module == "patch_embed" and kind == "kernel":
        return {"patch_embed.proj.weight": value.transpose(3, 2, 0, 1)}
    if module in ("patch_embed", "norm", "fc_norm", "head") and kind in KINDS:
        proj = ".proj" if module == "patch_embed" else ""
        return {f"{module}{proj}.{KINDS[kind]}": value.T}
    raise ConfigError(f"'{name}' is no parameter of a model that timm knows")


def _fusion(rest: str, gated: bool, fused: bool) -> tuple[str, list[str]] | None:
    """For a leaf that timm keeps fused: its name there and the leaves that it consists of."""
    match = re.fullmatch(r"attn/(query|key|value)/(kernel|bias)", rest)
    if match and fused and not (gated and match[2] == "bias"):
        kind = KINDS[match[2]]
        return f"attn.qkv.{kind}", [f"attn/{p}/{match[2]}" for p in ("query", "key", "value")]
    match = re.fullmatch(r"mlp/(gate|up)/(kernel|bias)", rest)
    if match and fused:
        return f"mlp.fc1.{KINDS[match[2]]}", [f"mlp/{p}/{match[2]}" for p in ("gate", "up")]
    return None


def _fuse(flat: Mapping[str, np.ndarray], block: str, ours: list[str]) -> np.ndarray:
    for name in ours:
        if block + name not in flat:
            raise ConfigError(f"'{block}{name}' is missing; timm keeps it together with others")
    return np.concatenate([_torch_layout(name, flat[block + name]) for name in ours])


def _torch_layout(rest: str, value: np.ndarray) -> np.ndarray:
    """A leaf of a block in PyTorch's layout: [out, in], heads folded into the width."""
    if re.fullmatch(r"attn/(query|key|value)/kernel", rest):
        return value.transpose(1, 2, 0).reshape(-1, value.shape[0])
    if rest == "attn/out/kernel":
        return value.reshape(-1, value.shape[-1]).T
    return value.reshape(-1) if value.ndim == 2 and rest.endswith("bias") else value.T
