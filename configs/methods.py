"""`model.reduction` of a config, and the pool that a method needs."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from cropr_jax.reducers.registry import options

# The paper's Pool column, where it differs from the backbone's own: CLS where the method reads it,
# and for merged tokens the mean over the patches that they stand for.
POOLS = {"attn_topk": "cls", "ats": "cls", "evit": "cls", "tome": "mean_size_weighted"}


def reduction(arg: Mapping[str, Any], rate: int, patches: int) -> ConfigDict:
    """The `model.reduction` of the shared arguments.

    Args:
      arg: parsed arguments.
      rate: R of the per-block schedule unless `r=` says otherwise.
      patches: patch tokens of the model. The other schedules default to the paper's shares of
        them: 50 of 196 tokens at each of three stages (Table "cls_cmp"), 825 of 1,024 at once
        (Table "imagenet_sota").
    """
    rates = {
        "per_block": rate,
        "three_stage": patches * 50 // 196,
        "aggressive": patches * 825 // 1024,
    }
    chosen = {} if arg["reduction"] == "none" else options(arg["reduction"])
    if arg["distill"]:
        # Losses against an unpruned model, `config.teacher`, of the same sizes, pool and classes.
        # They are part of the papers of DynamicViT and SiT, but off by default: most users have no
        # teacher, and JoakimHaurum/TokenReduction, which the Cropr paper compares with, leaves
        # SiT's out.
        chosen["distill"] = True
    return ConfigDict(
        {
            "name": arg["reduction"],
            "schedule": arg["schedule"],
            "rate": rates[arg["schedule"]] if arg["r"] < 0 else arg["r"],
            "fusion": arg["fusion"],
            "options": chosen,
        }
    )


def pool(arg: Mapping[str, Any], default: str) -> str:
    """The pool of the method, or the default; a backbone that pools CLS does so with any method."""
    return default if default == "cls" else POOLS.get(arg["reduction"], default)
