"""Your own label maps: fine-tune a pretrained ViT or EVA-02 to segment images.

    python run.py --config configs/segmentation_folder.py:vit_ti,res=176x240 \
        --config.data.dir=/data/camvid --config.init=vit_tiny_patch16_224.npz
    python run.py --config configs/segmentation_folder.py:eva02_b,res=512,reduction=random ...

The folder (or `$SEGMENTATION_FOLDER`) holds `images/train/*.jpg`, `labels/train/*.png` with one id
a pixel, the same for `val`, and `meta.json`, which names the classes and the id to be ignored;
`--config.data.ignore` sets another. Any image size will do: `res`, height x width or one number, is
what the model sees. R prunes about 80 % of the patches by the last block but one.

`norm=imagenet` for weights that were trained with ImageNet's mean and standard deviation (MAE,
DeiT); the default is 0.5 (AugReg, BEiT), for EVA-02 CLIP's. Metrics are mIoU, mean class accuracy
and pixel accuracy on the annotations at their own size.
"""

from ml_collections import ConfigDict

from configs import base, segmentation

# Share of the patches that all sites together prune.
PRUNED = 0.8


def get_config(arg: str | None = None) -> ConfigDict:
    arg = segmentation.parse_arg(arg, ("vit_ti", *segmentation.SPECS))
    if arg.variant.startswith("eva02") and not arg.norm:
        arg.norm = "clip"
    res = segmentation.size(arg.res, "256")
    config = segmentation.make(arg, res)
    config.data.update(
        {
            "source": "segmentation_folder",
            "name": "segmentation_folder",
            "env": "SEGMENTATION_FOLDER",
        }
    )
    config.data.eval = {"val": "val"}
    config.total_epochs = 10.0
    config.cpu_devices = 2
    config.batch_size = 8
    config.eval_batch_size = 8
    config.log_every = 20
    config.checkpoint_every = 200
    config.optimizer.update(
        {"lr": 5e-4, "lr_reference": 8, "warmup_epochs": 1.0, "layer_decay": 0.75}
    )
    patches = res[0] * res[1] // segmentation.PATCH**2
    sites = segmentation.spec(arg).depth - 2
    config.model = segmentation.model(arg, res, int(PRUNED * patches / sites))
    return base.finish(config, arg)
