"""ADE20k with EVA-02: Table "ade_hyperp" and section "Semantic segmentation" of the paper.

    python run.py --config configs/ade20k.py:eva02_l --config.init=eva02_L_pt_m38m_p14to16.pt
    python run.py --config configs/ade20k.py:eva02_l,reduction=none
    python run.py --config configs/ade20k.py:eva02_l,reduction=random,seed=3
    python run.py --config configs/ade20k.py:eva02_l,fusion=cross_attn_concat
    python run.py --config configs/ade20k.py:eva02_l,fusion=dtop

Data: TFDS `ade20k` under `$TFDS_DATA_DIR`, which `python -m cropr_jax.data.ade20k` prepares from
`ADEChallengeData2016`.

Expected (Table "fusion" of the paper, medians of five seeds; not measured here):

| | mIoU | parameters slim | linear GMACs |
| --- | --- | --- | --- |
| reduction=none | 56.7 | 304 M | 311 |
| fusion=llf | 56.6 | 304 M | 183 |
| fusion=cross_attn | 49.3 | 319 M | 184 |
| fusion=token_concat | 51.8 | 304 M | 172 |
| fusion=cross_attn_concat | 51.1 | 319 M | 186 |
| fusion=mhsa_concat | 55.2 | 318 M | 186 |
| fusion=dtop | 50.1 | 308 M | 174 |

R = 40 after each of the first 22 blocks prunes 86 % of 1,024 patches. Half of the epochs have a
smaller R: every new one compiles the step once (`--config.curriculum.step=8` for fewer), and the
compiled programs stay on disk. The other variants have no row in the paper; they take the recipe of
eva02_l, and those of 12 blocks twice its R.
"""

from ml_collections import ConfigDict

from configs import base, segmentation

# In 64 x 64 blocks of 16 pixels; 12 blocks have half as many sites.
RATES = {24: 40, 12: 80}


def get_config(arg: str | None = None) -> ConfigDict:
    arg = segmentation.parse_arg(arg, ("eva02_l", "eva02_ti", "eva02_s", "eva02_b"))
    pruned = arg.reduction != "none"
    res = segmentation.size(arg.res, str(base.LOCAL_RES) if arg.runlocal else "512")
    # The released code has mean and deviation 0.5, the weights were trained with CLIP's: norm=clip.
    config = segmentation.make(arg, res)
    config.data.update({"name": "ade20k", "workers": 8})
    config.data.eval = {"validation": "validation"}
    # As released: the long side of the image is 512 at ratio 1. Segmenter, which the paper follows,
    # and mmsegmentation have the short one so: --config.preprocess.train.resize_base="(2048, 512)".
    config.preprocess.train.resize_base = res

    config.total_epochs = 64.0
    config.batch_size = 8
    # The released code evaluates image by image, every second epoch.
    config.eval_batch_size = 8
    config.eval_every = 2.0
    config.checkpoint_every = 2500
    config.optimizer.update(
        {
            # The rate of a batch of 8; poly with power 0.9 down to 0 as released, by step.
            "lr": 2e-5,
            "lr_reference": 8,
            "warmup_epochs": 0.0,
            "weight_decay": 0.05,
            # 0.9 in the paper's table. The released code sets it but its schedule overwrites it, so
            # that all parameters have one rate; the published numbers are of that.
            "layer_decay": 1.0,
        }
    )
    # "Increasing R linearly from 1 to 40" in the paper, from 0 in the released code: start=1 for
    # the former.
    config.curriculum.update({"epochs": 32.0 if pruned else 0.0, "start": 0})

    depth = segmentation.spec(arg).depth
    rate = RATES[depth] * res[0] * res[1] // 512**2
    config.model = segmentation.model(arg, res, rate)
    config.model.update(
        {
            "num_classes": 150,
            "drop_path": 0.2,
            # As released, of the unpruned model too; the paper gives the reason for LLF: fusion
            # must happen in every step.
            "drop_path_last_block": 0.0,
            # EVA-02's: as released.
            "head_init_std": 2e-5,
            "dtype": "bfloat16",
        }
    )
    return base.finish(config, arg)
