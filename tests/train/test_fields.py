"""Fields of a config: defaults of what is left out, hints at slips, and what may differ."""

import copy
import json
import re

import pytest
import tiny_config

from cropr_jax import tasks
from cropr_jax.errors import ConfigError
from cropr_jax.train import fields


def config():
    return fields.plain(tiny_config.get_config())


def segmentation():
    return fields.plain(tiny_config.segmentation_config())


def with_fields(values, **changes):
    """The config with `section__field` set, or taken out where it is `...`."""
    for name, value in changes.items():
        node = values
        *parents, last = name.split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is ...:
            node.pop(last, None)
        else:
            node[last] = value
    return values


def test_plain_values_are_those_of_json():
    values = config()
    assert values["optimizer"]["betas"] == [0.9, 0.999]
    assert values["total_steps"] is None and values["optimizer"]["freeze"] == []
    assert fields.plain(values) == values == json.loads(json.dumps(values))
    assert fields.plain({"a": (1, (2,))}) == {"a": [1, [2]]}


def test_leaves_by_dotted_name():
    nested = {"a": {"b": {"c": 1}, "d": [2]}, "e": {}, "f": None}
    # An empty section is a value: one that is empty differs from one that is not there.
    assert fields.leaves(nested) == {"a.b.c": 1, "a.d": [2], "e": {}, "f": None}


def test_defaults_of_what_a_config_leaves_out():
    given = with_fields(config(), accum_steps=..., init=...)
    before = copy.deepcopy(given)
    made = fields.settled(given)
    assert given == before
    expected = {
        "accum_steps": 1,
        "init": "",
        "init_resampling": "timm",
        "teacher": "",
        "train": "all",
        "targets": "labels",
        "curriculum": {"epochs": 0, "start": 0, "step": 1},
    }
    assert {name: made[name] for name in expected} == expected
    assert fields.settled(made) == made
    # Nothing else has changed.
    assert made["model"]["reduction"].pop("options")
    assert {name: value for name, value in made.items() if name not in expected} == given


def test_what_a_config_sets_stays():
    given = with_fields(config(), train="routers", curriculum={"epochs": 2, "step": None})
    made = fields.settled(with_fields(given, teacher=None, model__reduction__options={"heads": 2}))
    assert made["train"] == "routers" and made["teacher"] == ""
    assert made["curriculum"] == {"epochs": 2, "step": 1, "start": 0}
    options = made["model"]["reduction"]["options"]
    assert options["heads"] == 2 and options["selector"] == "topk"
    # A null that is a value of its own stays one.
    assert made["total_steps"] is None and made["optimizer"]["clip_norm"] is None


@pytest.mark.parametrize(("name", "expected"), [
    ("none", None),
    ("random", {}),
    ("attn_topk", {"source": "cls_row", "placement": "after", "inverse": False}),
    ("dtop", {}),
])  # fmt: skip
@pytest.mark.parametrize("options", [..., None, {}])
def test_options_of_a_method(name, expected, options):
    reduction = {"name": name, "rate": 3}
    made = fields.settled(
        with_fields(config(), model__reduction=reduction, model__reduction__options=options)
    )
    found = made["model"]["reduction"].get("options")
    assert (found or None) == (expected or None)


@pytest.mark.parametrize(("make", "changes", "message"), [
    (config, {"batchsize": 3}, "config.batchsize: no such field; did you mean batch_size or "),
    (config, {"data__sorce": "x"}, "config.data.sorce: no such field; did you mean source or "),
    (config, {"optimizer__weight_decai": 1},
     "config.optimizer.weight_decai: no such field; did you mean weight_decay"),
    (config, {"mesh__fdsp": 2}, "config.mesh.fdsp: no such field; did you mean fsdp?"),
    (config, {"curriculum": {"epochs": 0, "stop": 1}},
     "config.curriculum.stop: no such field; did you mean step"),
    (config, {"model__reduction__rates": 2},
     "config.model.reduction.rates: no such field; did you mean rate?"),
    (config, {"model__pol": "cls"}, "config.model.pol: no such field; did you mean pool?"),
    (config, {"mixup__cutmixx": 1}, "config.mixup.cutmixx: no such field; did you mean cutmix"),
    (config, {"preprocess__train__flipp": 1},
     "config.preprocess.train.flipp: no such field; did you mean flip?"),
    # What another task has.
    (segmentation, {"mixup": {}}, "config.mixup: no such field; there are accum_steps, batch_size"),
    (segmentation, {"model__pool": "cls"}, "config.model.pool: no such field; "),
    (config, {"preprocess__eval_stride": [4, 4]}, "config.preprocess.eval_stride: no such field"),
    (config, {"data__zero_is_ignored": True}, "config.data.zero_is_ignored: no such field"),
    # What must be there.
    (config, {"seed": ...}, "config.seed is missing"),
    (config, {"optimizer__lr": ...}, "config.optimizer.lr is missing"),
    (config, {"model__reduction": ...}, "config.model.reduction is missing"),
    (config, {"model__reduction__name": ...}, "config.model.reduction.name is missing"),
    (config, {"curriculum": {"start": 0}}, "config.curriculum.epochs is missing"),
    (segmentation, {"preprocess__train__resize_base": ...},
     "config.preprocess.train.resize_base is missing"),
    (config, {"mesh": 8}, "config.mesh: found 8, expected a section"),
    (config, {"optimizer": "adamw"}, "config.optimizer: found 'adamw', expected a section (AdamW"),
])  # fmt: skip
def test_wrong_names(make, changes, message):
    values = with_fields(make(), **changes)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        fields.check(values, tasks.get(values["task"]))


@pytest.mark.parametrize("make", [config, segmentation])
def test_right_names(make):
    values = make()
    kind = tasks.get(values["task"])
    fields.check(values, kind)
    fields.check(fields.settled(values), kind)
    for optional in ("total_steps", "accum_steps", "init", "distributed", "curriculum"):
        values.pop(optional, None)
        fields.check(values, kind)


def test_what_may_differ():
    """Nothing that changes a trained number; a field is not another that begins like it."""
    before = config()
    free = {
        "log_every": 7,
        "eval_batch_size": 8,
        "data__dir": "/elsewhere",
        "data__workers": 4,
        "data__eval": {"other": "test"},
        "mesh__fsdp": 2,
        "compiler_options": {"xla_x": 1},
    }
    assert fields.difference(with_fields(config(), **free), before) is None
    assert fields.difference(with_fields(config(), log_every_day=1), before) == "log_every_day"
    assert fields.difference(with_fields(config(), data__evals={"a": 1}), before) == "data.evals.a"
    assert fields.difference(with_fields(config(), log_every=7), before, free=()) == "log_every"


@pytest.mark.parametrize(("changes", "name"), [
    ({"seed": 2}, "seed"),
    ({"optimizer__lr": 0.1}, "optimizer.lr"),
    ({"optimizer__ema": 0.99}, "optimizer.ema"),
    ({"optimizer__lr_reference": ...}, "optimizer.lr_reference"),
    ({"model__width": 32, "batch_size": 8}, "batch_size"),  # the first of the alphabet
    ({"train": "routers"}, "train"),
    ({"curriculum__epochs": 1}, "curriculum.epochs"),
    ({"model__reduction__options": {"heads": 2}}, "model.reduction.options.heads"),
    ({"model__reduction__name": "random"}, "model.reduction.name"),
])  # fmt: skip
def test_what_may_not_differ(changes, name):
    values = with_fields(config(), **changes)
    for new, old in ((values, config()), (config(), values)):
        found = fields.difference(new, old)
        # Another method has other options, which differ first.
        assert found == name or (name == "model.reduction.name" and "options" in found)


def test_a_config_with_its_defaults_is_one_without():
    made = fields.settled(config())
    assert fields.difference(made, config()) is None
    assert fields.difference(config(), made) is None
    nulls = with_fields(config(), train=None, curriculum={"epochs": None})
    assert fields.difference(made, nulls) is None


def test_another_config_is_refused_with_both_values():
    """Those that a config leaves out are in words too."""
    new = fields.settled(with_fields(config(), optimizer__lr=0.1))
    message = (
        "config.optimizer.lr: 0.1, but the run in 'w' began with 0.05: choose another --workdir, "
        "or remove that one"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        fields.check_same(new, fields.settled(config()), "w")
    new = fields.settled(with_fields(config(), train="routers"))
    with pytest.raises(ConfigError, match="config.train: 'routers', but .* began with 'all'"):
        fields.check_same(new, config(), "w")
    fields.check_same(fields.settled(config()), config(), "w")
