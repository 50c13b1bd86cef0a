"""The Segmenter: its parameters, its order, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params
from flax.traverse_util import flatten_dict

from cropr_jax import models
from cropr_jax.errors import ConfigError
from cropr_jax.models import costs

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
    return rng.normal(size=(batch, *size, 3)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(0, 3))
def forward(model, params, x, train=False):
    return model.apply({"params": params}, x, train=train)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["vit", "eva02"])
def test_non_square_images_in_both_forms(backbone):
    model = build(backbone=backbone)
    params = random_params(model)
    assert ("fc_norm" in params) == (backbone == "eva02") == ("norm" not in params)
    x = images()
    logits, out = forward(model, params, x, True)
    assert logits.shape == (2, 3, 5, 3) and logits.dtype == jnp.float32
    assert [aux.shape for aux in out["auxiliary"]] == [(2, 15, 3)] * 2
    found, slim_out = forward(*models.slim(model, params), x)
    np.testing.assert_allclose(found, logits, atol=1e-5)
    np.testing.assert_array_equal(slim_out["pruned_after"], out["pruned_after"])


def test_every_patch_is_predicted_from_its_own_token():
    """Head and norm over the tokens of the last block, wherever they stand there."""
    model = build()
    params = jax.device_get(random_params(model))
    logits, out = jax.device_get(forward(model, params, images()))
    order = np.concatenate([out["kept"][-1], *out["pruned"]], axis=1)
    last = out["features"][-1][:, 1:]
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


def test_attention_of_all_patches_can_rank_them():
    """Although there is a CLS token, which a segmenter does not train to look."""
    model = build("attn_topk", options={"source": "col_mean"}, backbone="eva02")
    params = random_params(model)
    logits, out = forward(model, params, images())
    assert np.isfinite(logits).all() and logits.shape == (2, 3, 5, 3)
    assert [kept.shape for kept in out["kept"]] == [(2, 12), (2, 10)]


def test_one_query_for_all_saves_their_product():
    """The slim form against that of all queries: the same kept sets and logits, fewer FLOPs."""
    size = {"image_size": (32, 32), "width": 64}
    model = build(options={"sum_first": False}, **size)
    params = random_params(model)
    slim, slim_params = models.slim(model, params)
    x = images(size=(32, 32))

    def run(model, params):
        compiled = forward.lower(model, params, x).compile()
        return *compiled(params, x), compiled.cost_analysis()["flops"]

    logits, out, before = run(model, params)
    found, slim_out, after = run(slim, slim_params)
    np.testing.assert_allclose(found, logits, atol=1e-5)
    for one, other in zip(slim_out["kept"], out["kept"], strict=True):
        np.testing.assert_array_equal(one, other)
    entering = 65 + 62
    assert before - after == pytest.approx(2 * len(x) * 64 * entering * 64, rel=0.1)
    assert costs.count(model).all - costs.count(slim).all == 64 * entering * 64


def test_refusals():
    with pytest.raises(ConfigError, match="config.model.head: found 'boxes'"):
        build(head="boxes")
    with pytest.raises(ConfigError, match="num_queries: found 4, .* one of the 15 patches"):
        build(num_queries=4)
    with pytest.raises(ConfigError, match="fusion: found 'none', .* pruned patches too.* 'llf'"):
        build(fusion="none")
    with pytest.raises(ConfigError, match="'tome' .* so pruned tokens cannot be put back"):
        build("tome")
