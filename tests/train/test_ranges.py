"""Every field of a config with what it cannot hold: one line, or a step that can be traced."""

import copy
import math

import jax
import numpy as np
import pytest
import tiny_config

from configs import cifar10, digits, image_folder, in1k, segmentation_folder
from cropr_jax import tasks
from cropr_jax.errors import ConfigError
from cropr_jax.train import fields, recipe, sharding
from cropr_jax.train.run import Run
from cropr_jax.train.step import jit_train

CONFIGS = {
    "tiny": tiny_config.get_config,
    "maps": tiny_config.segmentation_config,
    "digits": lambda: digits.get_config("runlocal"),
    "cifar10": lambda: cifar10.get_config("vit_ti,runlocal"),
    "image_folder": lambda: image_folder.get_config("vit_ti,runlocal"),
    "in1k": lambda: in1k.get_config("eva02_l,runlocal"),
    "segmentation_folder": lambda: segmentation_folder.get_config("vit_ti,runlocal"),
}
WRONG = {
    "text": "nine",
    "empty text": "",
    "NaN": math.nan,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "negative": -1,
    "negative share": -0.5,
    "zero": 0,
    "flag": True,
    "huge": 10**12,
    "huge number": 1e36,
    "fraction": 1.5,
    "empty list": [],
    "one": [1],
    "NaN in a list": [math.nan, 0.5],
    "list of texts": ["(", "["],
    "four": [0.1, 0.2, 0.3, 0.4],
    "falling": [0.9, 0.1],
    "section": {"a": 1},
    "nothing": None,
}
# What no number is.
NEVER = ("text", "NaN", "infinity", "minus infinity", "empty list", "section", "flag")


def leaves_of(config):
    """Names of all fields that hold a value, sections too."""
    found = list(fields.leaves(config))
    sections = {name.rpartition(".")[0] for name in found} - {""}
    return sorted({*found, *sections})


def changed(config, name, value):
    made = copy.deepcopy(config)
    *parents, last = name.split(".")
    node = made
    for parent in parents:
        node = node[parent]
    node[last] = value
    return made


def traced(config):
    """Resolves a config and traces its step: what is left of a run is computing."""
    run = Run(recipe.resolve(config))
    batch = sharding.batch_sharding(run.recipe.mesh)
    example = {**run.recipe.examples().filler, "id": np.int32(0)}
    shapes = {
        k: jax.ShapeDtypeStruct((config["batch_size"], *np.shape(x)), np.asarray(x).dtype,
                                sharding=batch)
        for k, x in example.items()
    }  # fmt: skip
    jit_train(run.recipe.step(run.recipe.curriculum.at(0)), run.shardings).trace(
        run.abstract, shapes, run.key
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_what_no_field_can_hold(name):
    """Text where numbers stand and so on: refused by what is declared of the fields, at once."""
    config = fields.plain(CONFIGS[name]())
    kind = tasks.get(config["task"])
    fields.check(config, kind)
    numbers = {
        name
        for name, value in fields.leaves(config).items()
        if type(value) in (int, float) and not name.startswith("compiler_options.")
    }
    assert len(numbers) > 20
    for field in numbers:
        for wrong in NEVER:
            with pytest.raises(ConfigError) as said:
                fields.check(changed(config, field, WRONG[wrong]), kind)
            assert str(said.value).startswith(f"config.{field}: found ")
            assert ", expected " in str(said.value) and "\n" not in str(said.value)


@pytest.mark.slow
@pytest.mark.parametrize("field", leaves_of(fields.plain(tiny_config.get_config())))
def test_one_line_or_a_sound_step(field):
    """Nothing between: a wrong value never ends in another error than a line of its own."""
    config = fields.plain(tiny_config.get_config())
    accepted = []
    for what, value in WRONG.items():
        try:
            recipe.resolve(changed(config, field, value))
            accepted.append((what, value))
        except ConfigError as error:
            assert "\n" not in str(error) and len(str(error)) < 400
    for what, value in accepted:
        if isinstance(value, float) and not math.isfinite(value):
            pytest.fail(f"{field} takes {what}")


@pytest.mark.parametrize(("change", "message"), [
    ({"optimizer.clip_norm": 0}, "optimizer.clip_norm: found 0, expected a number above 0 and up"),
    ({"optimizer.clip_norm": -1.0}, "optimizer.clip_norm: found -1.0, expected a number above 0"),
    ({"optimizer.lr": 0}, "optimizer.lr: found 0, expected a number above 0 and up to 10"),
    ({"optimizer.lr": 1e36}, "optimizer.lr: found 1e+36"),
    ({"optimizer.ema": 1.5}, "optimizer.ema: found 1.5, expected a number from 0 and below 1"),
    ({"optimizer.betas": [0.9]}, "optimizer.betas: found [0.9], expected 2 values, each a number"),
    ({"optimizer.betas": [1.0, 1.5]}, "optimizer.betas: found [1.0, 1.5]"),
    ({"optimizer.weight_decay": -1}, "optimizer.weight_decay: found -1"),
    ({"optimizer.layer_decay": 0}, "optimizer.layer_decay: found 0"),
    ({"optimizer.freeze": ["block_["]}, "optimizer.freeze: found ['block_['], expected a list, "),
    ({"optimizer.freeze": "block_0"}, "optimizer.freeze: found 'block_0', expected a list"),
    ({"optimizer.min_lr": 5.0}, "optimizer.min_lr: found 5.0, expected no more than the peak"),
    ({"preprocess.std": [0.0, 0.5, 0.5]}, "preprocess.std: found [0.0, 0.5, 0.5], expected 3"),
    ({"preprocess.mean": [123.7, 116.3, 103.5]}, "preprocess.mean: found [123.7"),
    ({"preprocess.train.crop_scale": [1.0, 0.08]}, "preprocess.train.crop_scale: found [1.0, 0"),
    ({"preprocess.train.erase": 7}, "preprocess.train.erase: found 7"),
    ({"mixup.label_smoothing": 1.5}, "mixup.label_smoothing: found 1.5"),
    ({"mixup.group": -2}, "mixup.group: found -2, expected a whole number from 1"),
    ({"mixup": None}, "mixup: found None, expected a section"),
    ({"model.drop_path": 1.0}, "model.drop_path: found 1.0, expected a number from 0 and below 1"),
    ({"model.depth": 0}, "model.depth: found 0"),
    ({"model.dtype": "float16"}, "model.dtype: found 'float16', expected one of 'float32'"),
    ({"model.reduction.rate": -2}, "model.reduction.rate: found -2"),
    ({"model.reduction.options": {"heads": 0}}, "model.reduction.options.heads: found 0"),
    ({"data.workers": 1000}, "data.workers: found 1000, expected a whole number from 0 to 512"),
    ({"seed": -1}, "seed: found -1"),
    ({"seed": 2**32}, "seed: found 4294967296"),
    ({"log_every": True}, "log_every: found True"),
    ({"eval_every": -1}, "eval_every: found -1"),
    ({"mesh.data": 0}, "mesh.data: found 0, expected one of -1, or a whole number from 1"),
    ({"train": "router"}, "train: found 'router', expected one of 'all', 'routers'"),
    ({"targets": "teacher"}, "targets: found 'teacher', expected one of 'labels', 'model'"),
    ({"distributed": 1}, "distributed: found 1, expected True or False"),
    ({"data.eval": {"test": 3}}, "data.eval.test: found 3, expected a text"),
])  # fmt: skip
def test_the_line(change, message):
    config = fields.plain(tiny_config.get_config())
    for name, value in change.items():
        config = changed(config, name, value)
    with pytest.raises(ConfigError) as said:
        recipe.resolve(config)
    assert str(said.value).startswith(f"config.{message}")


@pytest.mark.slow
def test_what_is_accepted_can_be_traced():
    """The ends of ranges, and what is odd but sound."""
    config = fields.plain(tiny_config.get_config())
    for name, value in {
        "eval_every": 0,
        "seed": 2**32 - 1,
        "optimizer.lr": 10,
        "optimizer.betas": [0, 0],
        "optimizer.ema": 0,
        "optimizer.weight_decay": 0,
        "mixup.mixup": 1000,
        "mixup.switch_prob": 1,
        "preprocess.std": [1, 1, 1],
        "preprocess.crop_ratio": 1,
        "model.mlp_ratio": 0.2,
        "model.drop_path": 0.99,
        "model.prefix": 0,
        "model.head_init_std": 0,
    }.items():
        traced(changed(config, name, value))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_says_what_it_means(name):
    """What `--print_fields` shows."""
    config = fields.settled(fields.plain(CONFIGS[name]()))
    found = fields.declared(config)
    assert list(found) == list(fields.leaves(config))
    assert all(field.meaning and field.kind.expected for field in found.values())
    lines = fields.describe(config).splitlines()
    assert len(lines) == 2 * len(found)
    assert lines[lines.index("config.optimizer.eps = 1e-08") + 1] == (
        "    added to the root of the second moment: a number above 0 and up to 1"
    )
