"""Parameters of models: the slim form, what stays float32, the model without its reducers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params

from cropr_jax import models
from cropr_jax.core import trees
from cropr_jax.reducers.registry import REDUCERS

FIELDS = {"width": 8, "depth": 3, "heads": 2, "patch": 4, "image_size": 16, "num_classes": 3}
MULTI_HEAD = {"heads": 2, "projections": True, "pre_norm": True}


def build(name="cropr", fusion="none", options=None, **fields):
    reduction = {"name": name, "rate": 2, "fusion": fusion, "options": options or {}}
    return models.create(FIELDS | {"reduction": reduction} | fields)


def names(params):
    return set(trees.flatten(params))


def test_a_fresh_model_has_its_form():
    model = build()
    params = models.abstract_params(model)
    sites = {name for name in names(params) if trees.of_site(name)}
    assert {"reducer_0/scorer/queries", "reducer_1/auxiliary_head/linear/kernel"} < sites
    of_slim = models.abstract_params(model.clone(slim=True))
    found = {name for name in names(of_slim) if trees.of_site(name)}
    assert found == {"reducer_0/scorer/query", "reducer_1/scorer/query"}


def test_a_fresh_model_is_in_float32_and_follows_its_key():
    model = models.create(FIELDS | {"depth": 1, "dtype": "bfloat16"})
    first, again, other = (models.init(model, jax.random.key(seed)) for seed in (0, 0, 1))
    assert jax.eval_shape(lambda: first) == models.abstract_params(model)
    assert {leaf.dtype for leaf in jax.tree.leaves(first)} == {jnp.dtype("float32")}
    kernels = [params["block_0"]["mlp"]["fc1"]["kernel"] for params in (first, again, other)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert np.abs(kernels[0] - kernels[2]).max() > 0.01


def test_shapes_are_each_callers_own():
    """They are kept once found; who takes some out must not take them from others."""
    model = build()
    shapes = models.abstract_params(model)
    shapes["block_0"].clear()
    assert models.abstract_params(model)["block_0"]


@pytest.mark.parametrize("options", [{}, MULTI_HEAD, MULTI_HEAD | {"pre_norm": False}])
def test_slim_sites_of_cropr(options):
    """One query: that of all of them, with the projections on its side of the product."""
    model = build(options=options, num_queries=2)
    params = random_params(model)
    slim, slimmed = models.slim(model, params)
    assert slim.slim and slim.clone(slim=False) == model
    scorer = {name: np.asarray(leaf) for name, leaf in
              trees.flatten(params["reducer_0"]["scorer"]).items()}  # fmt: skip
    query = scorer["queries"]
    if options:
        query = query @ scorer["query/kernel"] @ scorer["key/kernel"].T
    kept = {"query", "norm/scale", "norm/bias"} if options.get("pre_norm") else {"query"}
    found = trees.flatten(slimmed["reducer_0"])
    assert set(found) == {f"scorer/{name}" for name in kept}
    np.testing.assert_allclose(found["scorer/query"], query.sum(0), atol=1e-5)
    for name, leaf in slimmed.items():
        assert trees.of_site(name) or leaf is params[name]
    # What is slim already stays as it is.
    assert models.slim(slim, slimmed)[0] is slim
    assert names(models.slim(slim, slimmed)[1]) == names(slimmed)


@pytest.mark.parametrize(("options", "read"), [
    ({}, ["queries"]),
    (MULTI_HEAD, ["key/kernel", "norm/bias", "norm/scale", "queries", "query/kernel"]),
])  # fmt: skip
def test_what_inference_reads_of_a_site(options, read):
    needed = models.slim_leaves(build(options=options))
    sites = sorted(name for name in names(needed) if name.startswith("reducer_1/"))
    assert sites == [f"reducer_1/scorer/{name}" for name in read]


@pytest.mark.parametrize("name", sorted(REDUCERS))
def test_the_leaves_of_the_slim_form_suffice_and_none_is_spare(name):
    model = build(name, depth=2)
    params = models.abstract_params(model)
    needed = trees.flatten(models.slim_leaves(model))
    whole = trees.flatten(params)
    assert needed.items() <= whole.items()
    # All but the sites is there; and so is what the slim form is made of.
    assert {name for name in whole if not trees.of_site(name)} <= set(needed)
    slim = functools.partial(models.slim_params, model)
    expected = models.abstract_params(model.clone(slim=True))
    assert jax.eval_shape(slim, trees.unflatten(needed)) == expected
    for spare in filter(trees.of_site, needed):
        without = {name: leaf for name, leaf in needed.items() if name != spare}
        try:
            found = jax.eval_shape(slim, trees.unflatten(without))
        except KeyError:
            continue
        assert found != expected, spare


FULL = {
    "cls": False,
    "pos_embed": False,
    "patch_embed/kernel": False,
    "patch_embed/bias": False,
    "block_1/norm1/scale": True,
    "block_1/norm2/bias": True,
    "block_1/attn/key/kernel": False,
    "block_1/mlp/fc1/bias": False,
    "block_1/mlp/norm/scale": True,
    "block_1/layer_scale1/gamma": False,
    "fusion/block/norm_source/scale": True,
    "fusion/queries": False,
    "fusion/proj/kernel": False,
    "fc_norm/scale": True,
    "norm/bias": True,
    "head/kernel": False,
    "reducer_0/scorer/query": True,
    "reducer_0/predictor/fc1/kernel": True,
}


@pytest.mark.parametrize("name", FULL)
def test_what_is_used_in_float32(name):
    assert build(dtype="bfloat16").full_precision(name) == FULL[name]


@pytest.mark.parametrize(("name", "fields"), [
    ("cropr", {"mlp": "swiglu_norm", "layer_scale": 0.1}),
    ("dynamicvit", {"pool": "cls"}),
    ("random", {"head": "segmentation", "fusion": "cross_attn_concat"}),
])  # fmt: skip
def test_what_is_cast(name, fields):
    """In bfloat16 norms and sites stay in float32, whatever lies above a norm in the tree."""
    model = build(name, dtype="bfloat16", **fields)
    cast = functools.partial(models.cast_params, model)
    params = models.abstract_params(model)
    after = trees.flatten(jax.eval_shape(cast, params))
    assert after.keys() == trees.flatten(params).keys()
    for leaf, found in after.items():
        site, norm = leaf.startswith("reducer_"), "norm" in leaf.rpartition("/")[0]
        assert found.dtype == (jnp.float32 if site or norm else jnp.bfloat16), leaf


def test_cast_parameters_predict_the_same():
    """They are cast once instead of in every call."""
    model = build(depth=2, mlp="swiglu_norm", layer_scale=0.1, dtype="bfloat16")
    model, params = models.slim(model, random_params(model))
    images = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype(np.float32)

    @jax.jit
    def predict(params, images):
        logits, out = model.apply({"params": params}, images)
        return logits, out["kept"]

    cast = models.cast_params(model, params)
    (expected, kept), (found, again) = predict(params, images), predict(cast, images)
    np.testing.assert_array_equal(found, expected)
    assert np.abs(expected).max() > 0.01
    np.testing.assert_array_equal(kept[0], again[0])


def test_in_float32_nothing_is_cast():
    model = build()
    params = random_params(model)
    cast = trees.flatten(models.cast_params(model, params))
    for name, leaf in trees.flatten(params).items():
        assert cast[name].dtype == jnp.float32
        np.testing.assert_array_equal(cast[name], leaf)


@pytest.mark.parametrize("head", [{}, {"head": "segmentation", "num_queries": 16}])
def test_the_unpruned_model(head):
    """The same fields and parameters, but sites and fusion; nothing is drawn in training."""
    fusion = "mhsa_concat" if head else "llf"
    kept = {"layer_scale": 0.5, **head}
    pruned = build(
        fusion=fusion, options={"heads": 2}, drop_path=0.2, drop_path_last_block=0.1, **kept
    )
    whole = models.unpruned(pruned)
    # Of a model without sites no fusion does anything.
    assert whole.clone(fusion="llf") == models.create(FIELDS | kept)
    assert not any(whole.drop_rates()) and any(pruned.drop_rates())
    kept = {
        name
        for name in names(models.abstract_params(pruned))
        if not name.startswith(("reducer_", "fusion/"))
    }
    assert names(models.abstract_params(whole)) == kept
    params, images = models.abstract_params(whole), jnp.zeros((1, 16, 16, 3))
    train = functools.partial(whole.apply, train=True)
    _, out = jax.eval_shape(train, {"params": params}, images)
    assert out["kept"] == () and len(out["features"]) == 3
