"""What the configs of semantic segmentation share, beside `configs/base.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict, config_dict

from configs import arguments, methods
from configs import base as base_config
from cropr_jax.core.fusion import DENSE_FUSIONS, NEW_BLOCKS
from cropr_jax.errors import ConfigError
from cropr_jax.models import VARIANTS, eva02
from cropr_jax.models.vit import ViTSpec
from cropr_jax.reducers.registry import OF_FUSIONS

SPECS = {f"vit_{name}": spec for name, spec in VARIANTS.items() if spec.patch == 16} | {
    f"eva02_{name}": spec for name, spec in eva02.VARIANTS.items()
}
PATCH = 16
# Every patch has a prediction, so the CLS token's attention says less than the mean over all
# (section "Comparison to baselines").
ATTN_TOPK_SOURCE = "col_mean"


def parse_arg(arg: str | None, variants: Sequence[str], **defaults: Any) -> ConfigDict:
    """As `arguments.parse_arg`; `fusion=dtop` brings its own method along."""
    defaults = {"fusion": "llf", "res": "", "norm": ""} | defaults
    parsed = arguments.parse_arg(arg, variants, DENSE_FUSIONS, **defaults)
    given = any(word.startswith("reduction=") for word in (arg or "").split(","))
    if parsed.fusion in OF_FUSIONS and not given:
        parsed.reduction = parsed.fusion
    return parsed


def size(res: str, default: str) -> tuple[int, int]:
    """`'176x240'` or `'512'` as (height, width).

    Raises:
      ConfigError: on anything else, or what 16 does not divide.
    """
    words = (res or default).split("x")
    if not (len(words) <= 2 and all(word.isdecimal() and int(word) for word in words)):
        raise ConfigError(f"--config res: found {res!r}, expected HEIGHTxWIDTH, or one number")
    found = int(words[0]), int(words[-1])
    if found[0] % PATCH or found[1] % PATCH:
        raise ConfigError(f"--config res: found {res!r}, expected multiples of the patch, {PATCH}")
    return found


def make(arg: Mapping[str, Any], res: tuple[int, int]) -> ConfigDict:
    """The fields that every config of segmentation has.

    Args:
      arg: parsed arguments.
      res: (height, width) of the model's input.
    """
    config = base_config.make(arg)
    config.task = "segmentation"
    del config.mixup
    # The id in the masks that does not count; None: as the data set describes itself.
    config.data.ignore = config_dict.placeholder(int)
    config.data.zero_is_ignored = False
    normalizations = base_config.NORMALIZATIONS | {"": base_config.HALF}
    config.preprocess = ConfigDict(
        {
            "res": res,
            **arguments.pick("norm", arg["norm"], normalizations),
            # (h, w) in pixels between windows of evaluation; None: the image is seen once, in full.
            "eval_stride": config_dict.placeholder(tuple),
            "train": {
                # (long, short) side of the box that an image is fitted into at ratio 1.
                "resize_base": (max(res), min(res)),
                "ratio_range": (0.5, 2.0),
                "cat_max_ratio": 0.75,
                "flip": True,
                "photometric": True,
            },
        }
    )
    # `power` is read with schedule='poly' alone.
    config.optimizer.update({"schedule": "poly", "power": 0.9, "min_lr": 0.0})
    return config


def model(arg: Mapping[str, Any], res: tuple[int, int], rate: int) -> ConfigDict:
    """The `model` of the arguments, without drop path.

    Args:
      arg: parsed arguments, `variant` one of `SPECS`.
      res: (height, width).
      rate: R of the per-block schedule.
    """
    name, _, variant = arg["variant"].partition("_")
    patches = res[0] * res[1] // PATCH**2
    # Of the few patches of a small image a site prunes one at least.
    reduction = methods.reduction(arg, max(rate, 1), patches)
    if arg["reduction"] == "attn_topk":
        reduction.options.source = ATTN_TOPK_SOURCE
    made = ConfigDict(
        {
            "name": name,
            "variant": variant,
            "head": "segmentation",
            "depth": spec(arg).depth,
            "patch": PATCH,
            "image_size": res,
            "num_classes": 0,  # counted in the data
            "drop_path": 0.0,
            "drop_path_last_block": 0.0,
            "dtype": "float32",
            "remat": False,
            "attention": "auto",
            "reduction": reduction,
        }
    )
    if arg["fusion"] in NEW_BLOCKS:
        # The paper does not speak of it; its numbers of parameters and GFLOPs have it.
        made.extra_proj = True
    return made


def spec(arg: Mapping[str, Any]) -> ViTSpec:
    """Sizes of the variant."""
    return SPECS[arg["variant"]]
