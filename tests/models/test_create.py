"""From a config to a model: defaults, and what a wrong field is told."""

import re

import pytest

from cropr_jax.core.schedule import Schedule
from cropr_jax.errors import ConfigError, ScheduleError
from cropr_jax.models import Classifier, Segmenter, complete, create, head_of, make_schedule, pair
from cropr_jax.reducers.random import Random
from cropr_jax.reducers.registry import REDUCERS

FIELDS = {"width": 8, "depth": 4, "heads": 2, "patch": 4, "image_size": 16, "num_classes": 3}
CROPR = {"name": "cropr", "rate": 2, "fusion": "none"}


def refused(message, error=ConfigError, **fields):
    with pytest.raises(error, match=message) as caught:
        create(FIELDS | fields)
    assert "\n" not in str(caught.value)


def test_sizes_are_one_number_or_two():
    assert pair(7) == (7, 7) and pair((2, 3)) == pair([2, 3]) == (2, 3)
    model = create(FIELDS | {"image_size": [8, 16], "patch": (2, 4)})
    assert (model.image_size, model.patch, model.grid) == ((8, 16), (2, 4), (4, 4))


def test_a_config_goes_before_its_variant_before_its_architecture():
    given = {"image_size": 28, "num_classes": 5}
    fields = complete(given | {"name": "eva02", "variant": "ti", "heads": 4, "pool": None})
    assert (fields["width"], fields["depth"], fields["patch"]) == (192, 12, 14)
    assert fields["mlp"] == "swiglu"  # the architecture's own is 'swiglu_norm'
    assert (fields["heads"], fields["pool"], fields["use_key_bias"]) == (4, "mean_patches", False)
    # What the head has not is not taken over from the architecture.
    assert "pool" not in complete(
        given | {"name": "eva02", "variant": "ti", "head": "segmentation"}
    )


def test_what_a_config_leaves_out():
    model = create(FIELDS)
    assert type(model) is Classifier and head_of({}) is Classifier
    assert (model.reduction, model.schedule) == ("none", Schedule(4))
    assert (model.pool, model.prefix, model.drop_path) == ("mean_all", 1, 0.0)
    segmenter = create(FIELDS | {"head": "segmentation", "reduction": CROPR | {"fusion": "llf"}})
    assert type(segmenter) is Segmenter and segmenter.num_queries == 16
    assert create(FIELDS | {"pool": None, "layer_scale": None}) == model
    without = {name: value for name, value in CROPR.items() if name != "fusion"}
    assert create(FIELDS | {"reduction": without}).fusion == "llf"


class Weighted(Random):
    """A method with options of which one is a list in JSON."""

    weights: tuple[float, ...] = ()
    alone: int = 0


def test_configs_read_from_json_make_models_that_are_hashable(monkeypatch):
    monkeypatch.setitem(REDUCERS, "weighted", Weighted)
    reduction = {"name": "weighted", "rate": 2, "options": {"weights": [0.5, 2.0], "alone": 1}}
    model = create(FIELDS | {"reduction": reduction, "image_size": [16, 16]})
    assert model.reducer_options == (("alone", 1), ("weights", (0.5, 2.0)))
    assert hash(model) == hash(create(FIELDS | {"reduction": reduction}))


@pytest.mark.parametrize(("fields", "message"), [
    ({"pol": "cls"}, "config.model.pol: no such field; did you mean pool?"),
    ({"dropp_path": 0.1}, "config.model.dropp_path: no such field; did you mean drop_path or "),
    ({"xyz": 1}, "config.model.xyz: no such field; there are attention, "),
    # A field of another head.
    ({"head": "segmentation", "pool": "cls", "reduction": CROPR | {"fusion": "llf"}},
     "config.model.pool: no such field; "),
])  # fmt: skip
def test_an_unknown_field_gets_a_hint(fields, message):
    refused(re.escape(message), **fields)


def test_a_hint_names_fields_of_the_head_alone():
    with pytest.raises(ConfigError) as caught:
        create(FIELDS | {"head": "segmentation", "pol": 1, "reduction": CROPR | {"fusion": "llf"}})
    assert "pool" not in str(caught.value)


DENSE = "'llf', 'cross_attn', 'token_concat', 'cross_attn_concat', 'mhsa_concat', 'dtop'"


@pytest.mark.parametrize(("fusion", "fields", "message"), [
    ("cross_attn", {},
     "config.model.reduction.fusion: 'cross_attn' restores the image for a head that predicts at "
     "every patch (model.head='segmentation'); expected one of 'llf', 'none'"),
    ("none", {"head": "segmentation"},
     "config.model.reduction.fusion: found 'none', but this head predicts at pruned patches too; "
     f"expected one of {DENSE}"),
    ("dtop", {"head": "segmentation"}, "config.model.reduction: the fusion 'dtop' prunes by its "),
    ("lllf", {}, f"config.model.reduction.fusion: found 'lllf', expected one of {DENSE}, 'none'"),
])  # fmt: skip
def test_a_fusion_that_does_not_go_with_the_head(fusion, fields, message):
    refused(re.escape(message), reduction=CROPR | {"fusion": fusion}, **fields)


@pytest.mark.parametrize(("fields", "message"), [
    ({"pool": "cls"}, "config.model.prefix: pool 'cls' needs a CLS token, found 0"),
    ({"reduction": {"name": "attn_topk", "rate": 2, "fusion": "none"}, "pool": "mean_patches"},
     "config.model.prefix: 'attn_topk' needs a CLS token, found 0"),
    ({"reduction": {"name": "attn_topk", "rate": 2, "fusion": "none"}, "pool": "cls"},
     "config.model.prefix: pool 'cls' and 'attn_topk' need a CLS token, found 0"),
])  # fmt: skip
def test_a_prefix_that_the_pool_or_the_method_lacks(fields, message):
    refused(f"^{re.escape(message)}$", prefix=0, **fields)
    assert create(FIELDS | {"prefix": 0, "pool": "mean_patches"}).prefix == 0


@pytest.mark.parametrize(("fields", "message"), [
    ({"pool": "max"}, "config.model.pool: found 'max', expected one of 'cls', 'mean_patches'"),
    ({"dtype": "float16"}, "config.model.dtype: found 'float16', expected one of 'float32', 'bf"),
    ({"head": "boxes"}, "config.model.head: found 'boxes', expected one of 'classification', 's"),
    ({"num_classes": None}, "config.model.num_classes is missing"),
    ({"image_size": (16, 18)}, "config.model.image_size: (16, 18) is not a multiple of the patch"),
    ({"reduction": CROPR | {"options": {"heads": 3}}},
     "config.model.reduction.options.heads: 3 heads do not divide the width 8"),
    ({"reduction": CROPR | {"options": {"colour": 3}}}, "options.colour: no such field; there are"),
    ({"reduction": CROPR | {"schedule": "linear"}},
     "config.model.reduction.schedule: found 'linear', expected one of 'per_block', 'three_stage'"),
    ({"reduction": {"name": "crop", "rate": 2}}, "config.model.reduction.name: found 'crop'"),
    ({"name": "eva02", "reduction": {"name": "sit", "rate": 2, "fusion": "none"}},
     "config.model.reduction.name: 'sit' keeps no positions"),
    ({"reduction": {"name": "tome", "rate": 2, "fusion": "llf"}},
     "so pruned tokens cannot be put back; use 'none'"),
])  # fmt: skip
def test_a_wrong_field_is_named(fields, message):
    refused(re.escape(message), **fields)


@pytest.mark.parametrize(("name", "rate", "fusion", "sites"), [
    # One more at the first site, for CLS; with LLF none after the last block but one.
    ("per_block", 2, "llf", ((1, 3), (2, 2))),
    ("per_block", 2, "none", ((1, 3), (2, 2), (3, 2))),
    ("per_block", 0, "llf", ((1, 0), (2, 0))),
    ("three_stage", 4, "none", ((1, 5), (2, 4), (3, 4))),
    ("aggressive", 9, "none", ((3, 9),)),
])  # fmt: skip
def test_schedules_by_name(name, rate, fusion, sites):
    reduction = {"name": "random", "rate": rate, "schedule": name, "fusion": fusion}
    assert create(FIELDS | {"reduction": reduction}).schedule == Schedule(4, sites)
    made = make_schedule(name, rate, depth=4, patches=16, prefix=1, fusion=fusion != "none")
    assert made == Schedule(4, sites)


def test_a_schedule_that_cannot_be_met():
    """It names the block; of methods with a limit of their own, the largest rate too."""
    message = r"config.model.reduction \(rate 9\): .*after block 2 9 of 6 patch tokens"
    refused(message, ScheduleError, reduction=CROPR | {"rate": 9})
    reduction = {"name": "tome", "rate": 9, "fusion": "none", "schedule": "aggressive"}
    refused(
        r"\(rate 9\): at block 3 'tome' can remove at most 8 of 16 patch tokens, not 9; the "
        "largest rate of this schedule is 8",
        ScheduleError,
        reduction=reduction,
    )
    assert create(FIELDS | {"reduction": reduction | {"rate": 8}}).schedule.removed == 8
