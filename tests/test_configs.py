"""Every config resolves at full size, shrinks to a laptop's, and can be overridden."""

import importlib.util
from pathlib import Path

import pytest

from cropr_jax import models
from cropr_jax.errors import ConfigError
from cropr_jax.train.recipe import check_names, leaves, plain

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
REDUCTIONS = ("cropr", "none", "random", "variance", "attn_topk", "non_salient")


def get_config(name, arg):
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(arg)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["digits", "in1k", "cifar10", "image_folder"])
def test_every_reduction_resolves_and_shrinks(name, reduction):
    full = get_config(name, f"reduction={reduction}")
    local = get_config(name, f"reduction={reduction},runlocal")
    for config in (full, local):
        check_names(plain(config))
        assert config.model.reduction.name == reduction
        model = plain(config)["model"]
        models.create(model | {"num_classes": model["num_classes"] or 10})
    assert local.total_steps == 2 and local.model.depth == 4


# (R, tokens at the end, blocks pruned) of the paper's tables.
ROWS = {
    "vit_l": (8, 20),
    "vit_l,fusion=none": (8, 12),
    "vit_l,schedule=three_stage": (50, 46),
    "vit_l,schedule=three_stage,fusion=none": (50, 46),
    "vit_l,res=336": (18, 45),
    "vit_l,res=448": (32, 80),
    "vit_b": (16, 36),
    "vit_h": (8, 16),
}


@pytest.mark.parametrize("arg", ROWS)
def test_rows_of_the_paper(arg):
    config = get_config("in1k", arg)
    model = models.create(plain(config)["model"])
    height, width = model.grid
    rate, tokens = ROWS[arg]
    assert config.model.reduction.rate == rate
    assert model.schedule.tokens(height * width, 1)[-1] == tokens
    assert config.optimizer.lr * config.batch_size / config.optimizer.lr_reference == 4e-3
    large = "vit_l" in arg or "vit_h" in arg
    assert config.total_epochs == (50 if large else 100)
    assert config.optimizer.layer_decay == (0.75 if large else 0.65)
    assert config.model.drop_path == {"vit_b": 0.1, "vit_h": 0.3}.get(arg[:5], 0.2)
    assert config.model.drop_path_last_block == 0
    assert get_config("in1k", "vit_l,reduction=none").model.drop_path_last_block == 0.2


def test_rates_and_options_can_be_set():
    assert get_config("in1k", "vit_l,r=0").model.reduction.rate == 0
    config = get_config("in1k", "vit_l")
    config.update_from_flattened_dict({"model.reduction.options.heads": 16})
    assert dict(models.create(plain(config)["model"]).reducer)["heads"] == 16


def test_aggressive_schedule_and_pools():
    config = get_config("in1k", "vit_l,schedule=aggressive")
    assert config.model.reduction.fusion == "none"
    assert models.create(plain(config)["model"]).schedule.blocks == (3,)
    assert get_config("in1k", "vit_l,reduction=attn_topk").model.pool == "cls"
    assert get_config("in1k", "vit_l").model.pool == "mean_all"


@pytest.mark.parametrize("name", ["digits", "in1k", "cifar10", "image_folder"])
def test_every_leaf_can_be_set(name):
    config = get_config(name, None)
    values = leaves(config.to_dict())
    replacements = {"total_steps": 7, "optimizer.clip_norm": 1.0, "optimizer.ema": 0.9}
    replacements["preprocess.train.crop_scale"] = (0.5, 1.0)
    for field, value in values.items():
        if field == "model.reduction.options":  # any names, none by default
            continue
        config.update_from_flattened_dict({field: replacements.get(field, value)})


def test_mistakes_name_what_is_known():
    for arg, message in {
        "vit_x": "variant: found 'vit_x'",
        "vit_l,rr=3": "'rr' is unknown; known are .*'r'",
        "vit_l,r=many": "r: found 'many', expected a value of type int",
        "vit_l,reduction=crop": "reduction: found 'crop'",
        "vit_l,runlocal=maybe": "runlocal: found 'maybe'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            get_config("in1k", arg)
    with pytest.raises(ConfigError, match="norm: found 'grey'"):
        get_config("cifar10", "norm=grey")
