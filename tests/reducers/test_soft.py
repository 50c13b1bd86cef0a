"""What the soft methods share: their weights serve one number of outputs, and say so."""

import jax
import numpy as np
import pytest
from conftest import random_params

from cropr_jax import models
from cropr_jax.convert.load import load
from cropr_jax.core.trees import flatten
from cropr_jax.errors import ConfigError
from cropr_jax.reducers.registry import REDUCERS

NAMES = ("patchmerger", "sinkhorn", "sit")


def build(name, rate=2, image_size=8, **fields):
    reduction = {"name": name, "rate": rate, "fusion": "none"} | fields.pop("reduction", {})
    base = {"width": 8, "depth": 3, "heads": 2, "patch": 2, "num_classes": 3}
    return models.create(base | {"image_size": image_size, "reduction": reduction} | fields)


@pytest.mark.parametrize("name", NAMES)
def test_loading_into_another_schedule_or_size_names_the_site(name, tmp_path):
    params = random_params(build(name))
    path = str(tmp_path / "weights.npz")
    np.savez(path, **flatten(params))
    same = load(path, build(name))
    assert same.params.keys() == flatten(params).keys()
    for model, block, count in ((build(name, 3), 1, 12), (build(name, image_size=12), 1, 33)):
        with pytest.raises(
            ConfigError, match=rf"site 0 \(after block {block}\).*K = 13.*K = {count}"
        ):
            load(path, model)
    # The first site agrees, the second does not.
    other = build(name).clone(schedule=type(model.schedule)(3, ((1, 3), (2, 4))))
    with pytest.raises(ConfigError, match=r"site 1 \(after block 2\).*K = 11.*K = 9"):
        load(path, other)


@pytest.mark.parametrize("name", NAMES)
def test_each_parameter_that_holds_the_count_is_named(name):
    one, other = (flatten(models.abstract_params(build(name, rate))) for rate in (2, 3))
    axes = REDUCERS[name].count_axes
    differ = {k.partition("/")[2] for k in one if one[k].shape != other[k].shape}
    assert differ == set(axes)
    for leaf, axis in axes.items():
        assert one[f"reducer_0/{leaf}"].shape[axis] == 13


@pytest.mark.parametrize("name", NAMES)
def test_refuses_fusion_and_rotary_positions(name):
    with pytest.raises(ConfigError, match="keeps no positions"):
        build(name, reduction={"fusion": "llf"})
    with pytest.raises(ConfigError, match="rotary embeddings"):
        build(name, rope_reference=4, num_classes=3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("patchmerger", {"scale": "d"}),
        ("sinkhorn", {"epsilon": 0.0}),
        ("sinkhorn", {"iterations": 0}),
    ],
)
def test_options_that_cannot_work(name, options):
    with pytest.raises(ConfigError, match="expected"):
        build(name, reduction={"options": options})


def test_outputs_stand_for_no_place():
    model = build("sit")
    images = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    _, out = jax.jit(model.apply)({"params": random_params(model)}, images)
    assert [kept.shape[1] for kept in out["kept"]] == [13, 11]
    assert all((kept == -1).all() for kept in out["kept"])
    assert out["pruned"] == () and "pruned_after" not in out
