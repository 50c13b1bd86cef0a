"""Which methods prune untrained, and the rows of a table of them."""

import jax
import numpy as np
import pytest
from conftest import random_params

from cropr_jax import models
from cropr_jax.bench import untrained
from cropr_jax.bench.untrained import Variant
from cropr_jax.errors import ConfigError
from cropr_jax.reducers.registry import REDUCERS

FIELDS = {"width": 16, "depth": 4, "heads": 2, "patch": 4, "image_size": 16, "num_classes": 5}
FIELDS |= {"pool": "cls"}


def test_methods_without_parameters_are_those_registered():
    found = set(untrained.parameter_free(FIELDS))
    named = {"ats", "attn_topk", "dpc_knn", "evit", "kmedoids", "random", "tome", "variance"}
    assert named < found and "attn_topk_inverse" in found
    assert {name.removesuffix(untrained.INVERSE) for name in found} < set(REDUCERS)
    assert not found & {"cropr", "non_salient", "dynamicvit", "sit", "sinkhorn", "patchmerger"}


def test_options_and_draws():
    assert Variant("dpc_knn").fields()["options"] == {"equal_weight": True}
    assert Variant("attn_topk_inverse").fields()["options"] == {"inverse": True}
    assert Variant("random").draws() and not Variant("tome").draws() and not Variant().draws()


def test_plan_leaves_out_refused_fusion_and_says_what_cannot_be_met():
    reductions, rates = ("tome", "evit", "random"), (("aggressive", 9),)
    made, unreachable = untrained.plan(FIELDS, reductions, rates)
    rows = ["none-none", "evit-none", "random-llf", "random-none"]
    assert [f"{variant.reduction}-{variant.fusion}" for variant in made] == rows
    assert all(model.schedule.removed == 9 for model in list(made.values())[1:])
    ((variant, reason),) = unreachable.items()
    assert variant == Variant("tome", "aggressive", 9, "none")
    assert "at block 3 'tome' can remove at most 8 of 16" in reason
    # If nothing else is asked for, that is a mistake; so is a rate that no method can meet.
    with pytest.raises(ConfigError, match="'evit' fuses what it prunes"):
        untrained.plan(FIELDS, reductions[1:], rates, ["llf"])
    with pytest.raises(ConfigError, match="16 of 16 patch tokens"):
        untrained.plan(FIELDS, reductions, [("aggressive", 16)])


def test_inverse_keeps_what_attention_would_prune():
    sets = []
    for name in ("attn_topk", "attn_topk_inverse"):
        # One site that removes 8 of 16 patches, one of them for the prefix.
        variant = Variant(name, "per_block", 7, "none")
        model = models.create(FIELDS | {"depth": 2, "reduction": variant.fields()})
        images = np.random.default_rng(1).normal(size=(2, 16, 16, 3)).astype(np.float32)
        _, out = jax.jit(model.apply)({"params": random_params(model)}, images)
        sets.append((np.sort(out["kept"][0]), np.sort(out["pruned"][0])))
    np.testing.assert_array_equal(sets[0][0], sets[1][1])
    np.testing.assert_array_equal(sets[0][1], sets[1][0])
