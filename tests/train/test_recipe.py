"""What a config resolves to, and what is refused before anything is compiled."""

import json
import re

import pytest
import tiny_config

from cropr_jax.errors import ConfigError
from cropr_jax.train import fields, loop, optimizer, recipe
from cropr_jax.train.card import card, facts


def config_with(**changes):
    """The tiny config with `section__field` set."""
    config = tiny_config.get_config()
    with config.unlocked():
        for name, value in changes.items():
            node = config
            *parents, last = name.split("__")
            for parent in parents:
                node = node[parent]
            node[last] = value
    return config


def test_numbers_of_the_recipe():
    resolved = recipe.resolve(config_with())
    assert (resolved.steps_per_epoch, resolved.total_steps, resolved.eval_every) == (4, 8, 4)
    assert resolved.training.learning_rate.warmup_steps == 2
    assert resolved.training.learning_rate.peak == 0.05 * 16 / 256
    assert resolved.eval_examples == {"test": 21}
    found = facts(resolved)
    assert found["tokens"] == [13] and found["tpr"] == 0.25
    assert found["params_slim"] < found["params"] == found["params_trained"]


def test_card_tells_what_matters():
    text = card(recipe.resolve(config_with()))
    for words in (
        "0.05 x 16/256 = 0.003125",
        "17 -> 13",
        "25.0% of 16 patches",
        "8 = 2 epochs of 4",
        "cropr, per_block, R 3, fusion llf\n",
    ):
        assert words in text
    values = {"name": "cropr", "schedule": "per_block", "rate": 3, "fusion": "llf"}
    ablation = values | {"options": {"heads": 2, "mlp": True}}
    text = card(recipe.resolve(config_with(model__reduction=ablation)))
    assert "cropr, per_block, R 3, fusion llf, heads 2\n" in text


DISTILLED = {
    "name": "dynamicvit",
    "schedule": "per_block",
    "rate": 3,
    "fusion": "none",
    "options": {"distill": True},
}


def test_teacher():
    resolved = recipe.resolve(config_with(model__reduction=DISTILLED, teacher="runs/whole"))
    teacher = resolved.training.teacher
    assert teacher is not None and resolved.step(resolved.model.schedule).teacher is teacher
    assert teacher.reduction == "none" and teacher.pool == resolved.model.pool
    text = card(resolved)
    words = "cross-entropy, 2 x ratio, 0.5 x (KL of logits, mse of tokens)"
    assert re.search(rf"losses +{re.escape(words)}\n", text)
    assert re.search(r"learns from +runs/whole", text)
    plain = recipe.resolve(config_with(model__reduction=DISTILLED | {"options": {}}))
    assert plain.training.teacher is None
    assert re.search(r"losses +cross-entropy, 2 x ratio\n", card(plain))


ROUTERS = {"train": "routers", "init": "runs/whole", "model__drop_path": 0.0}


@pytest.mark.parametrize("targets", [None, "labels", "model"])
def test_routers_alone(targets):
    resolved = recipe.resolve(config_with(**ROUTERS, targets=targets))
    step = resolved.step(resolved.model.schedule)
    assert all(name.startswith("reducer_") for name in step.trainable)
    assert step.from_model == (step.teacher is not None) == (targets == "model")
    # Layer-wise decay, 0.75 here, must not make the first routers crawl.
    names, depth = step.trainable, resolved.model.depth
    assert set(optimizer.layer_multipliers(names, depth, 0.75).values()) == {1.0}
    text = card(resolved)
    assert "auxiliary loss of each site, only the routers are trained" in text
    assert ("targets are the predictions of the frozen model" in text) == step.from_model


def test_total_steps_scale_the_warmup():
    resolved = recipe.resolve(config_with(total_steps=4))
    assert (resolved.total_steps, resolved.training.learning_rate.warmup_steps) == (4, 1)


def test_config_is_plain_json():
    values = fields.plain(config_with())
    assert json.loads(json.dumps(values)) == values
    assert values["preprocess"]["res"] == [8, 8]


@pytest.mark.parametrize(("changes", "message"), [
    ({"batchsize": 3}, r"config.batchsize: no such field; did you mean batch_size"),
    ({"optimizer__learning_rate": 3},
     "config.optimizer.learning_rate: no such field; there are betas, .* lr, "),
    ({"model__deepth": 3}, r"config.model.deepth: no such field; did you mean depth"),
    ({"task": "classifikation"}, "config.task: found 'classifikation'"),
    ({"batch_size": 12}, r"config.batch_size: 12 does not divide by 8 devices x 1 .*below is 8"),
    ({"batch_size": 128}, r"config.batch_size.*128.*64 examples"),
    ({"accum_steps": 4}, r"16 does not divide by 8 devices x 4"),
    ({"eval_batch_size": 20}, "config.eval_batch_size: 20 does not divide by 8"),
    ({"batch_size": 0}, "config.batch_size: found 0"),
    ({"mixup__group": 6}, "config.mixup.group = 6"),
    ({"mesh__fsdp": 3}, "config.mesh.fsdp = 3 does not divide the 8"),
    ({"mesh__data": 4}, "config.mesh.data x mesh.fsdp = 4 x 1|4 x 1, but there are 8"),
    ({"compiler_options": {"xla_no_such": 1}}, "config.compiler_options: .*xla_no_such"),
    ({"compiler_options": {"xla_llvm_disable_expensive_passes": "so"}}, "compiler_options: .*'so'"),
    ({"batch_size": 4}, "batch_size: 4 does not divide by 8 devices x 1 .* the smallest is 8"),
    ({"compiler_options": "fast"}, "config.compiler_options: found 'fast'"),
    ({"optimizer__warmup_epochs": 3.0}, "optimizer.warmup_epochs: found 3.0, expected no more"),
    ({"optimizer__freeze": ("blok.*",)}, "config.optimizer.freeze: 'blok.*' matches no"),
    ({"optimizer__schedule": "step"}, "config.optimizer.schedule: found 'step'"),
    ({"model__reduction__name": "tomee"}, "config.model.reduction.name: found 'tomee', .*'tome'"),
    ({"model__reduction__rate": 20}, "after block 1 21 of 16 patch tokens"),
    ({"model__num_classes": 3}, "config.model.num_classes: 3, but the data set has 4"),
    ({"preprocess__res": (16, 16)}, "config.preprocess.res: .*config.model.image_size"),
    ({"data__source": "tdfs"}, "config.data.source is 'tdfs'"),
    ({"data__eval": {}}, "config.data.eval: empty"),
    ({"train": "heads"}, "config.train: found 'heads', expected one of 'all', 'routers'"),
    ({"targets": "images"}, "config.targets: found 'images'"),
    ({"targets": "model"}, "config.targets: .* train='all' freezes none"),
    (ROUTERS | {"init": ""}, "config.init: empty, but train='routers'"),
    (ROUTERS | {"model__drop_path": 0.1}, r"config.model.drop_path: 0.1, last block 0.0"),
    (ROUTERS | {"model__reduction": {"name": "none"}}, "config.train: .* 'none' has no sites"),
    (ROUTERS | {"model__reduction__name": "random"}, "'random' has nothing to train"),
    (ROUTERS | {"model__reduction": DISTILLED}, "'dynamicvit' learns from what later blocks"),
    ({"teacher": "runs/whole"}, "config.teacher: 'runs/whole', but 'cropr' .* learns from no"),
    ({"model__reduction": DISTILLED}, "config.teacher: empty, but 'dynamicvit' with distill"),
])  # fmt: skip
def test_refused(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        recipe.resolve(config_with(**changes))
    assert "\n" not in str(caught.value)


def test_missing_field_is_named():
    config = tiny_config.get_config()
    with config.unlocked():
        del config.optimizer.eps
    with pytest.raises(ConfigError, match="config.optimizer.eps is missing"):
        recipe.resolve(config)


def test_another_config_in_the_same_place():
    before = fields.plain(config_with())
    fields.check_same(fields.plain(config_with(log_every=7, mesh__fsdp=2)), before, "w")
    with pytest.raises(ConfigError, match="config.optimizer.lr: 0.1, but .*began with 0.05"):
        fields.check_same(fields.plain(config_with(optimizer__lr=0.1)), before, "w")


LEFT_OUT = dict.fromkeys(("init_resampling", "teacher", "train", "targets"))


@pytest.mark.parametrize("changes", [
    {}, LEFT_OUT, {"curriculum": None}, {"curriculum": dict.fromkeys(("epochs", "start", "step"))},
])  # fmt: skip
def test_a_run_from_before_defaults_were_written_out_resumes(changes, tmp_path):
    """With nulls, or without the fields; and without an option that its method had not yet."""
    resolved = recipe.resolve(config_with())
    before = json.loads(json.dumps(resolved.config))
    for name in (*fields.DEFAULTS, "curriculum"):
        before.pop(name, None)
    before |= changes
    options = before["model"]["reduction"]["options"]
    del options["train_queries"]
    assert fields.difference(resolved.config, before) is None
    (tmp_path / "config.json").write_text(json.dumps(before))
    loop._claim(tmp_path, resolved)
    # What it set otherwise still counts.
    before["train"] = "routers"
    with pytest.raises(ConfigError, match="config.train: 'all', but .* began with 'routers'"):
        fields.check_same(resolved.config, before, tmp_path)
    before["train"], options["train_queries"] = None, 2
    assert fields.difference(resolved.config, before) == "model.reduction.options.train_queries"
