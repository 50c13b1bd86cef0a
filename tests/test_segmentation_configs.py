"""The configs of semantic segmentation: numbers of the paper, every method and fusion, mistakes."""

import pytest
from test_configs import get_config

from cropr_jax import models
from cropr_jax.core.fusion import DENSE_FUSIONS, NEW_BLOCKS
from cropr_jax.errors import ConfigError
from cropr_jax.reducers.registry import REDUCERS
from cropr_jax.tasks.segmentation.task import Segmentation
from cropr_jax.train import card, fields, recipe
from cropr_jax.train.learning_rate import WarmupCosine

NAMES = ("ade20k", "segmentation_folder")
PRUNERS = ("none", *(name for name, made in REDUCERS.items() if not made().refuses_fusion))
ARGS = [f"reduction={name}" for name in PRUNERS] + [f"fusion={name}" for name in DENSE_FUSIONS]


def create(config):
    model = fields.plain(config)["model"]
    return models.create(model | {"num_classes": model["num_classes"] or 10})


@pytest.mark.parametrize("name", NAMES)
def test_every_method_and_fusion_shrinks(name):
    for arg in ARGS:
        if name == "ade20k" and not REDUCERS.get(arg[10:], REDUCERS["cropr"]).keeps_positions:
            continue
        config = get_config(name, f"{arg},runlocal")
        fields.check(fields.plain(config), Segmentation)
        model = create(config)
        key, _, value = arg.partition("=")
        assert getattr(model, key) == value
        assert (model.reduction == "dtop") == (value == "dtop")
        assert config.total_steps == 2 and model.depth == 4
        # A field that a recipe does not show cannot be set on the command line.
        assert config.model.get("extra_proj", False) == (value in NEW_BLOCKS)


@pytest.mark.parametrize("name", NAMES)
def test_resolves_down_to_the_optimizer(name):
    resolved = recipe.resolve(get_config(name, "runlocal"))
    assert "mixup" not in resolved.config and isinstance(resolved.task, Segmentation)
    assert len(resolved.class_names) == resolved.model.num_classes


@pytest.mark.parametrize("name", NAMES)
def test_every_leaf_can_be_set(name):
    config = get_config(name, None)
    replacements = {"total_steps": 7, "optimizer.clip_norm": 1.0, "optimizer.ema": 0.9}
    for field, value in fields.leaves(config.to_dict()).items():
        config.update_from_flattened_dict({field: replacements.get(field, value)})


def test_numbers_of_the_paper():
    config = get_config("ade20k", None)
    settings, train, model = config.optimizer, config.preprocess.train, create(config)
    assert (config.model.variant, config.model.patch, config.preprocess.res) == (
        "l",
        16,
        (512,) * 2,
    )
    assert (settings.lr * config.batch_size / settings.lr_reference, settings.schedule) == (
        2e-5, "poly",
    )  # fmt: skip
    assert (settings.betas, settings.eps, settings.weight_decay) == ((0.9, 0.999), 1e-8, 0.05)
    assert (config.batch_size, config.total_epochs, settings.warmup_epochs) == (8, 64, 0)
    assert (config.model.drop_path, model.prefix, model.num_classes) == (0.2, 1, 150)
    assert model.schedule.blocks == tuple(range(1, 23)) and model.fusion == "llf"
    assert model.schedule.tokens(1024, 1)[:2] == (984, 944)
    assert model.schedule.tokens(1024, 1)[-1] == 144
    assert config.curriculum.to_dict() == {"epochs": 32, "start": 0, "step": 1}
    # As released, where the paper says nothing or something else.
    assert (settings.power, settings.min_lr, settings.layer_decay) == (0.9, 0, 1)
    assert (train.resize_base, train.ratio_range, train.cat_max_ratio) == (
        (512, 512), (0.5, 2.0), 0.75,
    )  # fmt: skip
    assert config.preprocess.mean == config.preprocess.std == (0.5, 0.5, 0.5)
    assert model.drop_rates()[-1] == 0


def test_unpruned_has_no_curriculum():
    assert get_config("ade20k", "reduction=none").curriculum.epochs == 0


def test_attention_is_averaged_over_all_queries():
    for name in NAMES:
        assert create(get_config(name, "reduction=attn_topk")).make_reducer().source == "col_mean"


def test_auxiliary_branch_can_be_cut():
    config = get_config("segmentation_folder", "runlocal")
    config.update_from_flattened_dict({"model.reduction.options.train_queries": 64})
    assert create(config).make_reducer().train_queries == 64


def test_sizes():
    config = get_config("segmentation_folder", "vit_ti,res=176x240")
    assert config.preprocess.res == config.model.image_size == (176, 240)
    assert config.preprocess.train.resize_base == (240, 176)
    assert create(config).schedule.tpr(165) == pytest.approx(0.8, abs=0.05)
    assert get_config("segmentation_folder", "eva02_b,res=512").preprocess.mean[0] > 0.4
    assert get_config("ade20k", "res=256").model.reduction.rate == 10
    # One at least, where the share of a small image is less.
    assert get_config("segmentation_folder", "vit_ti,res=32x48").model.reduction.rate == 1


@pytest.mark.parametrize(("arg", "message"), [
    ("res=10x", "res: found '10x', expected HEIGHTxWIDTH"),
    ("res=100", "res: found '100', expected multiples of the patch, 16"),
    ("fusion=none", "fusion: found 'none'"),
    ("norm=grey", "norm: found 'grey'"),
])  # fmt: skip
def test_mistakes(arg, message):
    with pytest.raises(ConfigError, match=message):
        get_config("segmentation_folder", arg)


def test_logit_fusion_brings_its_method():
    config = get_config("segmentation_folder", "fusion=dtop,reduction=random")
    with pytest.raises(ConfigError, match="goes with no other method"):
        create(config)
    with pytest.raises(ConfigError, match="fusion: found 'dtop'"):
        get_config("cifar10", "fusion=dtop")


def test_head_and_task_go_together():
    config = get_config("segmentation_folder", "runlocal")
    config.model.head = "classification"
    with pytest.raises(ConfigError, match="model.head: found 'classification', but config.task"):
        recipe.resolve(config)
    config = get_config("segmentation_folder", "runlocal")
    config.optimizer.power = 0.0
    with pytest.raises(ConfigError, match=r"power: found 0\.0, expected a number above 0"):
        recipe.resolve(config)
    config.optimizer.update({"schedule": "cosine", "power": 0.9})  # which has no power
    assert isinstance(recipe.resolve(config).training.learning_rate, WarmupCosine)


def test_every_class_has_a_name():
    config = get_config("segmentation_folder", "runlocal")
    config.model.num_classes += 1
    with pytest.raises(ConfigError, match="num_classes: 11, but the data set names 10 classes"):
        recipe.resolve(config)


def test_preprocess_is_read_before_anything_is_written():
    config = get_config("segmentation_folder", "runlocal")
    config.preprocess.eval_stride = (8, 999)
    with pytest.raises(ConfigError, match=r"preprocess\.eval_stride is \(8, 999\)"):
        recipe.resolve(config)
    config.preprocess.eval_stride = config.preprocess.res
    height, width = config.preprocess.res
    said = card.card(recipe.resolve(config))
    assert f"windows every {height}x{width} pixels" in said
