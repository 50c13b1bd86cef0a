"""Your own classes: fine-tune a pretrained ViT on a folder of images.

    IMAGE_FOLDER=/data/flowers python run.py --config configs/image_folder.py:vit_b \
        --config.init=vit_base_patch16_224.npz

The folder holds `train/<class>/*.jpg` and `test/<class>/*.jpg` (png and webp too), or a
`labels.json` beside `images/` in each split. The classes are those of the folder; the head of the
checkpoint is replaced, and the log says so. `norm=imagenet` for weights that were trained with
ImageNet's mean and standard deviation (MAE, DeiT) rather than 0.5 (AugReg, BEiT).
"""

from ml_collections import ConfigDict

from configs import arguments, base, fine_tuning
from cropr_jax.models import VARIANTS

RATES = {"vit_b": 16, "vit_ti": 16, "vit_s": 16, "vit_l": 8}


def get_config(arg: str | None = None) -> ConfigDict:
    arg = arguments.parse_arg(arg, variants=("vit_b", "vit_ti", "vit_s", "vit_l"), norm="half")
    config = base.make(arg)
    res = arg.res or 224
    return fine_tuning.make(
        config,
        arg,
        data={"source": "image_folder", "name": "image_folder", "env": "IMAGE_FOLDER"},
        spec=VARIANTS[arg.variant.removeprefix("vit_")],
        rate=RATES[arg.variant] * res * res // 224**2,
        res=res,
        num_classes=0,  # counted in the folder
    )
