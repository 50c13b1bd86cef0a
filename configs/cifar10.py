"""CIFAR-10 from a pretrained ViT, in minutes: compare reducers on real photos.

    python run.py --config configs/cifar10.py:vit_ti --config.init=vit_tiny_patch16_224.npz
    python run.py --config configs/cifar10.py:vit_ti,reduction=random,source=tfds

Images are enlarged to 128 pixels, 64 patches. R = 5 after each of the first 11 blocks prunes 56 of
them (88 %). Data: `source=arrays` reads `$CIFAR10_DIR/train*.npz` and `test*.npz` (`images` uint8
[n, 32, 32, 3], `labels`), `source=tfds` the TFDS data set `cifar10`. CLS-trained weights keep CLS
pooling with every method. `docs/results` has what was measured.
"""

from ml_collections import ConfigDict

from configs import arguments, base, fine_tuning
from cropr_jax.models import VARIANTS

SOURCES = {
    "arrays": {"source": "arrays", "name": "cifar10", "env": "CIFAR10_DIR"},
    "tfds": {"source": "tfds", "name": "cifar10", "env": "TFDS_DATA_DIR"},
}
RATES = {"vit_ti": 5, "vit_s": 5, "vit_b": 5, "vit_l": 2}


def get_config(arg: str | None = None) -> ConfigDict:
    arg = arguments.parse_arg(
        arg, variants=("vit_ti", "vit_s", "vit_b", "vit_l"), source="arrays", norm="half"
    )
    config = base.make(arg)
    res = arg.res or 128
    return fine_tuning.make(
        config,
        arg,
        data=arguments.pick("source", arg.source, SOURCES),
        spec=VARIANTS[arg.variant.removeprefix("vit_")],
        rate=RATES[arg.variant] * res * res // 128**2,
        res=res,
        num_classes=10,
    )
