"""The table that a run starts with: what it says of data, model, costs and training."""

import pytest
import tiny_config

from cropr_jax.train import recipe
from cropr_jax.train.card import card, facts


def resolve(config, **changes):
    """The recipe of a config with `section__field` set."""
    with config.unlocked():
        for name, value in changes.items():
            node = config
            *parents, last = name.split("__")
            for parent in parents:
                node = node[parent]
            node[last] = value
    return recipe.resolve(config)


def rows(resolved):
    """Rows of the table by name, in their order."""
    title, *lines = card(resolved).splitlines()
    assert title == "Recipe"
    # Names stand behind two blanks and values two blanks behind the longest name.
    start = 4 + len("total pruning ratio")
    assert all(line.startswith("  ") and line[2:start].endswith("  ") for line in lines)
    found = {line[2:start].strip(): line[start:] for line in lines}
    assert len(found) == len(lines) and all(value == value.strip() for value in found.values())
    return found


# Of a width of 16: a block has 2 norms, 4 projections and an MLP of 64; 12 numbers a patch.
BLOCK = 2 * 32 + 4 * (16 * 16 + 16) + (16 * 64 + 64) + (64 * 16 + 16)
MACS_OF_A_TOKEN = 12 * 16**2


def test_of_a_classification():
    backbone = (12 * 16 + 16) + 16 + 17 * 16 + 3 * BLOCK + 32 + (16 * 4 + 4)
    site = 16 + (32 + 16 * 64 + 64 + 64 * 16 + 16) + (32 + 16 * 4 + 4)
    # 17 tokens, 13 behind the site, 17 again in the last block.
    linear = (17 + 13 + 17) * MACS_OF_A_TOKEN + 16 * 12 * 16 + 16 * 4
    products = 2 * (17**2 + 13**2 + 17**2) * 16
    resolved = resolve(tiny_config.get_config())
    assert facts(resolved) == {
        "tokens": [13],
        "tpr": 0.25,
        "params": backbone + site,
        "params_slim": backbone + 16,
        "macs_linear": linear,
        "macs_all": linear + products,
        "params_trained": backbone + site,
    }
    assert list(rows(resolved).items()) == [
        ("data", "fake, 64 training images; test 21"),
        (
            "model",
            "width 16, depth 3, heads 2, image 8x8, patch 2x2, pool mean_all, float32",
        ),
        ("reduction", "cropr, per_block, R 3, fusion llf"),
        ("losses", "cross-entropy, auxiliary loss of each site"),
        ("tokens", "17 -> 13"),
        ("total pruning ratio", "25.0% of 16 patches"),
        (
            "parameters",
            f"{backbone + site:,} in training ({backbone + site:,} trained), "
            f"{backbone + 16:,} slim",
        ),
        (
            "MACs per image",
            f"{linear / 1e9:.4g} G linear, {(linear + products) / 1e9:.4g} G with the attention "
            "products",
        ),
        ("batch", "16 images = 8 devices x 1 micro-batches x 2"),
        ("steps", "8 = 2 epochs of 4; warm-up 2"),
        ("learning rate", "0.05 x 16/256 = 0.003125, cosine to 1e-06, layer decay 0.75"),
        ("AdamW", "betas (0.9, 0.999), weight decay 0.05, clip off, average off"),
        ("mixing", "cutmix 1, group 8, label_smoothing 0.1, mixup 0.8, switch_prob 0.5"),
        ("mesh", "data 8 x fsdp 1 (cpu, 1 processes)"),
        ("seed", "1"),
    ]


def test_of_a_segmentation():
    """No pool and no mixing, but crops and a curriculum; its images are not square."""
    linear = (25 + 21 + 25) * MACS_OF_A_TOKEN + 24 * 12 * 16 + 24 * 16 * 4
    products = 2 * (25**2 + 21**2 + 25**2) * 16
    config = tiny_config.segmentation_config({"epochs": 2, "start": 1, "step": 1})
    found = rows(resolve(config, preprocess__eval_stride=(8, 4)))
    assert found.keys() - {"crops", "evaluation", "curriculum"} == (
        rows(resolve(tiny_config.get_config())).keys() - {"mixing"}
    )
    expected = {
        "data": "fake_segmentation, 64 training images; test 21",
        "model": "width 16, depth 3, heads 2, image 8x12, patch 2x2, float32",
        "losses": "cross-entropy of pixels, auxiliary loss of each site",
        "tokens": "25 -> 21",
        "curriculum": "R 1 3 in the first 2 epochs",
        "total pruning ratio": "16.7% of 24 patches",
        "MACs per image": f"{linear / 1e9:.4g} G linear, {(linear + products) / 1e9:.4g} G with "
        "the attention products",
        "learning rate": "0.05 x 16/256 = 0.003125, poly to 1e-06, layer decay 0.75",
        "crops": "of images in 12x8 times 0.5 to 2, one class below 75%",
        "evaluation": "windows every 8x4 pixels, a pass each",
    }
    assert {name: found[name] for name in expected} == expected
    assert "evaluation" not in rows(resolve(tiny_config.segmentation_config()))


def test_of_an_unpruned_model():
    found = rows(resolve(tiny_config.get_config(), model__reduction={"name": "none"}))
    assert (found["reduction"], found["losses"]) == ("none", "cross-entropy")
    assert found["tokens"] == "17 -> all" and found["total pruning ratio"].startswith("0.0%")
    whole, _, slim = found["parameters"].partition(" in training ")
    assert slim.endswith(f" {whole} slim")


@pytest.mark.parametrize(("changes", "row", "expected"), [
    ({"data__name": "digits", "data__eval": {"test": "test[64:85]", "few": "test[:5]"}},
     "data", "digits, 64 training images; few 5, test 21"),
    ({"model__dtype": "bfloat16", "model__pool": "cls"},
     "model", "width 16, depth 3, heads 2, image 8x8, patch 2x2, pool cls, bfloat16"),
    ({"batch_size": 32, "accum_steps": 2},
     "batch", "32 images = 8 devices x 2 micro-batches x 2"),
    ({"total_steps": 6}, "steps", "6 = 1.5 epochs of 4; warm-up 2"),
    ({"optimizer__clip_norm": 1.0, "optimizer__ema": 0.99},
     "AdamW", "betas (0.9, 0.999), weight decay 0.05, clip 1.0, average 0.99"),
    ({"mesh__fsdp": 2}, "mesh", "data 4 x fsdp 2 (cpu, 1 processes)"),
    ({"init": "weights.npz"}, "starts from", "weights.npz"),
])  # fmt: skip
def test_rows_follow_the_config(changes, row, expected):
    assert rows(resolve(tiny_config.get_config(), **changes))[row] == expected


def test_only_other_options_than_a_methods_own_are_told():
    reduction = {"name": "cropr", "schedule": "aggressive", "rate": 3, "fusion": "none"}
    options = {"heads": 2, "mlp": True, "selector": "sample"}
    config = tiny_config.get_config()
    made = resolve(config, model__depth=4, model__reduction=reduction | {"options": options})
    expected = "cropr, aggressive, R 3, fusion none, heads 2, selector sample"
    assert rows(made)["reduction"] == expected


def test_what_is_trained():
    """Of all parameters those that are not frozen; of routers alone, the sites."""
    site = 16 + (32 + 16 * 64 + 64 + 64 * 16 + 16) + (32 + 16 * 4 + 4)
    frozen = resolve(tiny_config.get_config(), optimizer__freeze=("block_0/.*",))
    found = facts(frozen)
    assert found["params"] - found["params_trained"] == BLOCK
    assert f"({found['params_trained']:,} trained)" in rows(frozen)["parameters"]
    routers = {"train": "routers", "targets": "model", "init": "whole", "model__drop_path": 0.0}
    alone = resolve(tiny_config.get_config(), **routers)
    assert facts(alone)["params_trained"] == site
    assert rows(alone)["losses"] == (
        "cross-entropy, auxiliary loss of each site, only the routers are trained, targets are the "
        "predictions of the frozen model, unpruned"
    )
