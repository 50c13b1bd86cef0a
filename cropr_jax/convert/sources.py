"""Whose weights a file holds, told by its names, and what they are called here.

| kind | names are like | files |
| --- | --- | --- |
| 'timm' | `blocks.0.attn.qkv.weight` | timm, MAE, DINOv2, and EVA-02 as timm names it |
| 'EVA' | `blocks.0.attn.q_bias`, `blocks.0.mlp.w1.weight` | the repository of EVA-02 |
| 'Cropr' | `cropr.0.cross_attn.queries` beside timm's | benbergner/cropr |
| 'vision_transformer' | `Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel` | AugReg |
| 'big_vision' | the same with other numbers | big_vision |
| 'cropr_jax' | `block_0/attn/query/kernel` | this package |

Nothing is computed here but small tables: arrays stay views of the file.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from cropr_jax.convert import flax_vit, timm
from cropr_jax.convert.messages import listed, shown
from cropr_jax.convert.resample import held_prefix, pad_prefix
from cropr_jax.errors import ConfigError
from cropr_jax.models.vit import VARIANTS

# In front of the names of a compiled, wrapped or distributed PyTorch model.
TORCH_PREFIX = r"(module\.|_orig_mod\.|model\.)+"
# baaivision/EVA: EVA-02/asuka/modeling_finetune.py -> timm `models/eva.py:checkpoint_filter_fn`.
EVA_NAMES = {"w12": "fc1", "w1": "fc1_g", "w2": "fc1_x", "w3": "fc2", "ffn_ln": "norm"}
REGISTERS = ("reg_token", "register_tokens")
# What files hold beside a classifier, and why it is left.
LEFT = (
    (r"(blocks\.\d+\.attn\.)?rope\..*", "computed, not learned"),
    (r"mask_token|lm_head\..*|decoder_.*", "used in pretraining only"),
)
HEAD_WIDTH = 64  # of all ViTs and EVA-02s but H/14


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One of our parameters in a file.

    Attributes:
      source: name or names there.
      array: in our layout, or its shape and dtype where it is read later.
      shape: there, of what it is a part of.
    """

    source: str
    array: Any
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """What a file holds.

    Attributes:
      kind: see the module.
      leaves: by our name.
      left: names of no use to any model here, and why.
      unknown: names that mean nothing here.
      grid: (h, w) of the position table if the file or the user tells it.
      padded: entries of the table that are not in the file, for prefix tokens.
    """

    kind: str
    leaves: dict[str, Leaf]
    left: dict[str, str]
    unknown: tuple[str, ...] = ()
    grid: tuple[int, int] | None = None
    padded: int = 0

    @property
    def prefix(self) -> int:
        """p of the weights; 0 too where their CLS is of no possible shape."""
        shape = tuple(self.leaves["cls"].array.shape) if "cls" in self.leaves else ()
        return shape[1] if len(shape) == 3 and shape[2] else 0


def recognise(
    arrays: Mapping[str, Any],
    heads: int | None = None,
    metadata: Mapping[str, str] | None = None,
    grid: tuple[int, int] | None = None,
) -> Source:
    """Arrays of a file under our names and in our layout.

    Args:
      arrays: by the file's names; of our own names it may be shapes.
      heads: attention heads of the backbone, for PyTorch's names; None for what its width implies.
      metadata: of the file.
      grid: (h, w) of the position table, if the user tells it.

    Raises:
      ConfigError: if the names are those of no known kind, show a model that none here computes, or
        two of them mean the same parameter.
    """
    if any(re.match(r"block_\d+/", name) for name in arrays):
        told = re.fullmatch(r"(\d{1,5})x(\d{1,5})", (metadata or {}).get("grid", ""))
        leaves = {name: Leaf(name, array, array.shape) for name, array in arrays.items()}
        grid = agreed(told and (int(told[1]), int(told[2])), grid)
        return Source("cropr_jax", leaves, {}, grid=grid)
    if flax_vit.is_flax(arrays):
        return _flax(arrays, grid)
    names = {name: re.sub(f"^{TORCH_PREFIX}", "", name) for name in arrays}
    if any(re.match(r"(visual\.)?(trunk\.)?blocks\.\d+\.", name) for name in names.values()):
        return _torch(arrays, names, heads, grid)
    raise ConfigError(
        f"its names are those of no ViT known here: {listed(map(shown, arrays), 4)}; expected "
        "timm's, MAE's, EVA-02's, Cropr's, big_vision's, vision_transformer's or our own"
    )


def agreed(told: tuple[int, int] | None, given: tuple[int, int] | None) -> tuple[int, int] | None:
    """The grid that a file tells, or else the user.

    Raises:
      ConfigError: if both do, and differ.
    """
    if told and given and told != given:
        raise ConfigError(
            f"the grid {given[0]} x {given[1]} was given, but the file says {told[0]} x {told[1]}"
        )
    return told or given


def guess_heads(width: int, depth: int) -> int:
    """Attention heads of a backbone, which PyTorch's weights do not tell.

    Raises:
      ConfigError: if the width is none of a known variant and no multiple of 64.
    """
    for spec in VARIANTS.values():
        if (spec.width, spec.depth) == (width, depth):
            return spec.heads
    if width < HEAD_WIDTH or width % HEAD_WIDTH:
        raise ConfigError(
            f"its attention heads cannot be told from a width of {width}: say how many there are"
        )
    return width // HEAD_WIDTH


class _Collector:
    """Leaves as they are found; two for one name are refused."""

    def __init__(self, grid: tuple[int, int] | None):
        self.grid = grid
        self.leaves: dict[str, Leaf] = {}
        self.left: dict[str, str] = {}
        self.unknown: list[str] = []

    def add(self, source: str, shape: tuple[int, ...], found: Mapping[str, np.ndarray]) -> None:
        """What an entry of this name and shape became."""
        for name, array in found.items():
            if name in self.leaves:
                raise ConfigError(
                    f"{shown(source)} and {shown(self.leaves[name].source)} both mean '{name}'"
                )
            self.leaves[name] = Leaf(source, array, shape)

    def source(self, kind: str, held: int | None) -> Source:
        """The source, its position table with an entry for every prefix token.

        Args:
          kind: see the module.
          held: prefix entries of the table; None if it may have one for each token or fewer.
        """
        made = Source(kind, self.leaves, self.left, tuple(self.unknown), self.grid)
        table, cls = self.leaves.get("pos_embed"), self.leaves.get("cls")
        if table is None or cls is None or not made.prefix:
            return made
        if table.array.ndim != 3 or table.array.shape[0] != 1:
            return made  # which no model has
        # Of one width, or zeros for many narrow tokens in a wide table might fill the memory.
        if cls.array.shape[2] != table.array.shape[2]:
            raise ConfigError(
                f"{shown(cls.source)} has shape {cls.shape}, {shown(table.source)} {table.shape}; "
                "expected the same width"
            )
        if held is None:
            held = held_prefix(table.array.shape[1], made.prefix, self.grid)
        padded = pad_prefix(table.array, made.prefix, held)
        self.leaves["pos_embed"] = dataclasses.replace(table, array=padded)
        return dataclasses.replace(made, padded=made.prefix - held)


def _flax(arrays: Mapping[str, np.ndarray], grid: tuple[int, int] | None) -> Source:
    found = _Collector(grid)
    big_vision = flax_vit.is_big_vision(arrays)
    # A representation layer stands between CLS and head; without it the head means nothing.
    pre_logits = any("pre_logits/" in name for name in arrays)
    for name, array in arrays.items():
        if pre_logits and re.fullmatch(r"(.*/)?(pre_logits|head)/\w+", name):
            found.left[name] = "head with a hidden layer"
            continue
        try:
            found.add(name, array.shape, flax_vit.leaves(name, array))
        except timm.UnknownName:
            found.unknown.append(name)
    if big_vision:
        return found.source("big_vision", 0)
    return found.source("vision_transformer", None)


def _torch(
    arrays: Mapping[str, np.ndarray],
    names: dict[str, str],
    heads: int | None,
    grid: tuple[int, int] | None,
) -> Source:
    """Of `names`, theirs without what stands in front."""
    if clip := next((n for n in names.values() if n.startswith("visual.")), None):
        raise ConfigError(
            f"{shown(clip)} shows the image tower of a CLIP model; only plain ViTs and EVA-02s "
            "can be loaded (of EVA-02-CLIP towers the attention differs too)"
        )
    found = _Collector(grid)
    state, kind = {}, "timm"
    for name, short in names.items():
        why = next((why for pattern, why in LEFT if re.fullmatch(pattern, short)), None)
        if why is not None:
            found.left[name] = why
            continue
        match = re.fullmatch(r"(blocks\.\d+\.mlp)\.(\w+)\.(weight|bias)", short)
        if match and match[2] in EVA_NAMES:
            short, kind = f"{match[1]}.{EVA_NAMES[match[2]]}.{match[3]}", "EVA"
        if short in state:
            raise ConfigError(f"{shown(name)} and {shown(state[short])} both mean {shown(short)}")
        state[short] = name
    theirs = {short: arrays[name] for short, name in state.items()}
    gated = timm.is_eva02(theirs)
    _move_mim_norm(found, state, theirs, gated)
    heads = heads or _heads(theirs)
    _join_registers(state, theirs)
    for short, array in theirs.items():
        try:
            found.add(state[short], array.shape, timm.leaves(short, array, heads, gated))
        except timm.UnknownName:
            found.unknown.append(state[short])
    if any(name.startswith("cropr.") for name in theirs):
        kind = "Cropr"
    return found.source(kind, None)


def _move_mim_norm(
    found: _Collector, state: dict[str, str], theirs: dict[str, np.ndarray], gated: bool
) -> None:
    """EVA-02 after pretraining: its last norm becomes `fc_norm`, in place.

    timm does so because it is a better start than a fresh one. MAE's and DINOv2's are no EVA-02
    and keep it.
    """
    if not gated or "fc_norm.weight" in state or not any("mask_token" in n for n in found.left):
        return
    for kind in ("weight", "bias"):
        if f"norm.{kind}" in state:
            state[f"fc_norm.{kind}"] = state.pop(f"norm.{kind}")
            theirs[f"fc_norm.{kind}"] = theirs.pop(f"norm.{kind}")


def _join_registers(state: dict[str, str], theirs: dict[str, np.ndarray]) -> None:
    """Puts register tokens behind CLS, in place: prefix tokens all."""
    for name in REGISTERS:
        if name not in theirs or "cls_token" not in theirs:
            continue
        cls, registers = theirs["cls_token"], theirs.pop(name)
        if cls.ndim != 3 or registers.ndim != 3 or cls.shape[::2] != registers.shape[::2]:
            raise ConfigError(
                f"{shown(name)} has shape {registers.shape}, cls_token {cls.shape}; expected "
                "[1, count, width] of one width"
            )
        theirs["cls_token"] = np.concatenate([cls, registers], axis=1)
        state["cls_token"] = f"{state['cls_token']} + {state.pop(name)}"


def _heads(theirs: Mapping[str, np.ndarray]) -> int:
    """Heads that the widths imply."""
    blocks = [int(m[1]) for name in theirs if (m := re.match(r"blocks\.(\d{1,4})\.", name))]
    norm = theirs.get("blocks.0.norm1.weight")
    if norm is None or norm.ndim != 1:
        raise ConfigError("'blocks.0.norm1.weight', which tells the width, is missing or no vector")
    return guess_heads(norm.shape[0], 1 + max(blocks))
