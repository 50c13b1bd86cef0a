"""The Segmenter: its parameters, its order, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params
from flax.traverse_util import flatten_dict

from cropr_jax import models
from cropr_jax.errors import ConfigError

BASE = {
    "head": "segmentation",
    "width": 16,
    "depth": 4,
    "heads": 2,
    "patch": 4,
    "image_size": (12, 20),
    "num_classes": 3,
}


def build(name="cropr", rate=2, fusion="llf", backbone="vit", options=None, **fields):
    reduction = {"name": name, "rate": rate, "fusion": fusion, "options": options or {}}
    return models.create(BASE | {"name": backbone, "reduction": reduction} | fields)


def images(batch=2, size=(12, 20), seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(batch, *size, 3)), jnp.float32)


@pytest.mark.parametrize("backbone", ["vit", "eva02"])
def test_non_square_images_in_both_forms(backbone):
    model = build(backbone=backbone)
    params = random_params(model)
    assert ("fc_norm" in params) == (backbone == "eva02") == ("norm" not in params)
    x = images()
    logits, out = jax.jit(lambda p: model.apply({"params": p}, x, train=True))(params)
    assert logits.shape == (2, 3, 5, 3) and logits.dtype == jnp.float32
    assert [aux.shape for aux in out["auxiliary"]] == [(2, 15, 3)] * 2
    slim, slim_params = models.slim(model, params)
    found, slim_out = jax.jit(lambda p: slim.apply({"params": p}, x))(slim_params)
    np.testing.assert_allclose(found, logits, atol=1e-5)
    np.testing.assert_array_equal(slim_out["pruned_after"], out["pruned_after"])


def test_every_patch_is_predicted_from_its_own_token():
    """Head and norm over the tokens of the last block, wherever they stand there."""
    model = build()
    params = random_params(model)
    logits, out = jax.jit(lambda p: model.apply({"params": p}, images()))(params)
    order = np.concatenate([out["kept"][-1], *out["pruned"]], axis=1)
    last = np.asarray(out["features"][-1])[:, 1:]
    for row in range(2):
        mean, std = last[row].mean(-1, keepdims=True), last[row].std(-1, keepdims=True)
        normed = (last[row] - mean) / std * params["norm"]["scale"] + params["norm"]["bias"]
        expected = normed @ params["head"]["kernel"] + params["head"]["bias"]
        found = logits[row].reshape(15, 3)[order[row]]
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_schedules_share_one_tree():
    def tree(rate):
        leaves = flatten_dict(models.abstract_params(build(rate=rate)), sep="/")
        return {name: leaf.shape for name, leaf in leaves.items()}

    assert tree(0) == tree(1) == tree(4)


def test_refusals():
    with pytest.raises(ConfigError, match="config.model.head: found 'boxes'"):
        build(head="boxes")
    with pytest.raises(ConfigError, match="num_queries: found 4, .* one of the 15 patches"):
        build(num_queries=4)
    with pytest.raises(ConfigError, match="fusion: found 'none', .* pruned patches too.* 'llf'"):
        build(fusion="none")
    with pytest.raises(ConfigError, match="'tome' .* so pruned tokens cannot be put back"):
        build("tome")
