"""The Cropr module against a NumPy reference written from the paper; its ablations; gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params

from cropr_jax import models
from cropr_jax.core import rng
from cropr_jax.cropr import Cropr, aggregate_queries, queries_init, score_tokens
from cropr_jax.errors import ConfigError
from cropr_jax.reducers import Context
from cropr_jax.tokens import from_features

WIDTH, PATCHES, CLASSES = 16, 12, 5
EMPTY = Context()
erf = np.vectorize(math.erf)


def layer_norm(x, params, epsilon):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + epsilon) * params["scale"] + params["bias"]


def dense(x, params):
    return x @ params["kernel"] + params.get("bias", 0)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def reference(x, params, prefix, keep, heads=1, mlp=True):
    """Scores, kept positions and auxiliary logits of one image [t, d], in float64."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    scorer, head = params["scorer"], params["auxiliary_head"]
    aggregator = params.get("aggregator")  # holds nothing with one head and no MLP
    normed = layer_norm(x, scorer["norm"], 1e-6) if "norm" in scorer else x
    queries, keys, values = scorer["queries"], normed, normed
    if "key" in scorer:
        queries = dense(queries, scorer["query"])
        keys, values = dense(normed, scorer["key"]), dense(normed, aggregator["value"])
    scores = (queries @ keys.T).sum(0)[prefix:]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    size = x.shape[-1] // heads
    parts = []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        weights = softmax(queries[:, part] @ keys[:, part].T / np.sqrt(size))
        parts.append(weights @ values[:, part])
    z = np.concatenate(parts, axis=-1)
    if heads > 1:
        z = dense(z, aggregator["out"])
    if mlp:
        hidden = dense(layer_norm(z, aggregator["norm"], 1e-6), aggregator["mlp"]["fc1"])
        gelu = hidden * 0.5 * (1 + erf(hidden / np.sqrt(2)))
        z = z + dense(gelu, aggregator["mlp"]["fc2"])
    logits = dense(layer_norm(z, head["norm"], 1e-5), head["linear"])
    return scores, order[:keep], logits


def scrambled(module, tokens, context=EMPTY, keep=7):
    """Parameters with random values everywhere, so that no bias or scale is invisible."""
    shapes = jax.eval_shape(
        lambda: module.init(jax.random.key(0), tokens, context, keep=keep, train=True)
    )
    draw = np.random.default_rng(2)
    return jax.tree.map(
        lambda leaf: draw.normal(0.1, 0.3, leaf.shape).astype(leaf.dtype), shapes["params"]
    )


def site(module, params, tokens, context=EMPTY, keep=7, train=True):
    """What a site returns, compiled, on the host."""
    call = jax.jit(module.apply, static_argnames=("keep", "train"))
    return jax.device_get(call({"params": params}, tokens, context, keep=keep, train=train))


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_queries": 6},
        {"mlp": False},
        {"heads": 4, "projections": True, "pre_norm": True, "num_queries": 3},
    ],
    ids=["paper", "queries", "no_mlp", "mha"],
)
def test_matches_the_reference(fields, prefix):
    module = Cropr(num_outputs=CLASSES, **fields)
    x = jax.random.normal(jax.random.key(0), (2, prefix + PATCHES, WIDTH))
    tokens = from_features(x, (3, 4), prefix)
    params = scrambled(module, tokens)
    kept, _, out = site(module, params, tokens)
    slim, _, slim_out = site(
        module.clone(slim=True), Cropr.slim_params(params), tokens, train=False
    )
    for row in range(2):
        scores, order, logits = reference(
            np.asarray(x[row], np.float64),
            params,
            prefix,
            7,
            fields.get("heads", 1),
            fields.get("mlp", True),
        )
        np.testing.assert_allclose(out["scores"][row], scores, atol=2e-5)
        np.testing.assert_allclose(slim_out["scores"][row], scores, atol=2e-5)
        np.testing.assert_array_equal(kept.index[row], order)
        np.testing.assert_array_equal(slim.index[row], order)
        np.testing.assert_allclose(out["auxiliary"][row], logits, atol=2e-5)


def test_slim_keeps_one_vector_per_site():
    module = Cropr(num_outputs=CLASSES, num_queries=64)
    tokens = from_features(jnp.ones((1, 1 + PATCHES, WIDTH)), (3, 4), 1)
    params = scrambled(module, tokens)
    slim = Cropr.slim_params(params)
    assert jax.tree.map(jnp.shape, slim) == {"scorer": {"query": (WIDTH,)}}


def test_scores_are_float32_in_bfloat16_models():
    x = (jax.random.normal(jax.random.key(0), (1, 256, 64)) * 0.01 + 1).astype(jnp.bfloat16)
    scores = score_tokens(jnp.ones(64), x)
    assert scores.dtype == jnp.float32
    assert len(np.unique(scores)) > 2 * len(np.unique(scores.astype(jnp.bfloat16)))


def test_queries_start_as_a_cut_normal():
    queries = queries_init(jax.random.key(0), (64, 1024))
    assert abs(float(queries.std()) * 32 - 0.8796) < 0.01
    assert float(jnp.abs(queries).max()) <= 2 / 32
    np.testing.assert_allclose(aggregate_queries(queries), queries.sum(0), atol=1e-6)


@pytest.mark.parametrize(("heads", "queries"), [(1, 1), (2, 3)])
def test_sampling_draws_from_the_attention_distribution(heads, queries):
    """With one token to keep, Gumbel Top-K keeps token i with the probability of the softmax.

    Of several softmaxes it is the geometric mean.
    """
    count, width = 6000, 4
    module = Cropr(num_outputs=2, selector="sample", heads=heads, num_queries=queries)
    x = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (1, 5, width)) * 2, (count, 5, width))
    tokens = from_features(x, (1, 5), 0)
    keys = rng.example_keys(jax.random.key(1), 0, jnp.arange(count))
    context = Context(keys=keys)
    params = scrambled(module, tokens, context, keep=1)
    params["scorer"]["queries"] = 1 + jax.random.normal(jax.random.key(3), (queries, width))
    kept, _, out = site(module, params, tokens, context, keep=1)
    part = (heads, width // heads)
    query, key = params["scorer"]["queries"].reshape(-1, *part), x[0].reshape(-1, *part)
    logits = np.einsum("nhk,mhk->hnm", query, key) * part[1] ** -0.5
    expected = softmax(np.log(softmax(logits)).mean((0, 1)))
    found = np.bincount(np.asarray(kept.index).ravel(), minlength=5) / count
    np.testing.assert_allclose(found, expected, atol=5 * 0.5 / np.sqrt(count))

    still, _, _ = site(module, params, tokens, context, keep=1, train=False)
    assert (still.index == np.argmax(out["scores"][0])).all()
    drawing = module.clone(sample_in_eval=True)
    drawn, _, _ = site(drawing, params, tokens, context, keep=1, train=False)
    np.testing.assert_array_equal(drawn.index, kept.index)
    with pytest.raises(ValueError, match="draws at random"):
        site(module, params, tokens, keep=1)
    with pytest.raises(ValueError, match="found 'best', expected 'topk' or 'sample'"):
        site(module.clone(selector="best"), params, tokens, context, keep=1)


def small_model(options=None, **fields):
    return models.create(
        {
            "width": 16,
            "depth": 4,
            "heads": 2,
            "patch": 4,
            "image_size": 16,
            "num_classes": CLASSES,
            "reduction": {"name": "cropr", "rate": 3, "fusion": "llf", "options": options or {}},
        }
        | fields
    )


@pytest.mark.parametrize("stop", [True, False])
def test_auxiliary_losses_do_not_reach_the_backbone(stop):
    model = small_model({"stop_gradient": stop})
    params = random_params(model)
    images = jax.random.normal(jax.random.key(1), (2, 16, 16, 3))

    def auxiliary(params):
        _, out = model.apply({"params": params}, images, train=True)
        return jnp.stack([(logits**2).sum() for logits in out["auxiliary"]])

    every = jax.device_get(jax.jit(jax.jacrev(auxiliary))(params))
    for name, gradient in every.items():
        largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient))
        if name.startswith("reducer_"):
            assert largest > 0, name
        elif stop:
            assert largest == 0, name
    if not stop:
        assert np.abs(every["patch_embed"]["kernel"]).max() > 0


def test_main_loss_does_not_reach_the_router():
    model = small_model()
    params = random_params(model)
    images = jax.random.normal(jax.random.key(1), (2, 16, 16, 3))

    def main(params):
        return (model.apply({"params": params}, images, train=True)[0] ** 2).sum()

    for name, gradient in jax.device_get(jax.jit(jax.grad(main))(params)).items():
        largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient))
        assert (largest == 0) == name.startswith("reducer_"), name


def test_some_queries_train_while_all_score():
    module = Cropr(num_outputs=CLASSES, num_queries=6)
    x = jax.random.normal(jax.random.key(0), (300, PATCHES, WIDTH))
    tokens = from_features(x, (3, 4), 0)
    context = Context(keys=rng.example_keys(jax.random.key(1), 0, jnp.arange(300)))
    params = scrambled(module, tokens, context)
    fewer = module.clone(train_queries=2)
    kept, _, every = site(module, params, tokens, context)
    same, _, out = site(fewer, params, tokens, context)
    np.testing.assert_array_equal(same.index, kept.index)
    np.testing.assert_array_equal(out["scores"], every["scores"])
    places = out["places"]
    assert places.shape == (300, 2) and (places[:, 0] != places[:, 1]).all()
    rows = np.take_along_axis(every["auxiliary"], places[..., None], axis=1)
    np.testing.assert_allclose(out["auxiliary"], rows, atol=1e-5)
    assert np.abs(np.bincount(places.ravel(), minlength=6) - 100).max() < 5 * 100**0.5

    def one(queries):
        changed = {"params": params | {"scorer": {"queries": queries}}}
        _, _, out = fewer.apply(changed, tokens, context, keep=7, train=True)
        return (out["auxiliary"][0] ** 2).sum()

    gradient = jax.jit(jax.grad(one))(params["scorer"]["queries"])
    assert set(np.flatnonzero(np.abs(gradient).max(1))) == set(places[0])
    with pytest.raises(ValueError, match="draws at random"):
        site(fewer, params, tokens)


def test_more_queries_than_there_are_cannot_train():
    with pytest.raises(ConfigError, match="train_queries: found 2, expected 1 to 1, .* or 0"):
        small_model({"train_queries": 2})


@pytest.mark.parametrize("drawn", [0, 4])
def test_remat_keeps_nothing_of_the_auxiliary_branch(drawn):
    """The gradient is the same; what is kept for it does not grow with the queries."""
    tokens = from_features(jax.random.normal(jax.random.key(0), (2, PATCHES, WIDTH)), (3, 4), 0)
    context = Context(keys=rng.example_keys(jax.random.key(1), 0, jnp.arange(2)))

    def build(queries, remat):
        module = Cropr(num_outputs=CLASSES, num_queries=queries, train_queries=drawn, remat=remat)

        def loss(params):
            _, _, out = module.apply({"params": params}, tokens, context, keep=7, train=True)
            return jnp.sin(out["auxiliary"]).sum()

        return loss, scrambled(module, tokens, context)

    def kept(loss, params):
        """Numbers that the backward pass holds beside parameters and queries."""
        backward = jax.eval_shape(lambda: jax.vjp(loss, params)[1])
        return models.count(backward) - models.count(params)

    (plain, params), (again, _) = build(8, False), build(8, True)
    expected, found = (jax.jit(jax.grad(loss))(params) for loss in (plain, again))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
    assert kept(plain, params) > 2 * 4 * 64 * (drawn or 8)
    # Logits, where the loss is taken, and the queries that were drawn.
    assert kept(again, params) < 2 * (PATCHES * WIDTH + (drawn or 8) * (CLASSES + WIDTH + 1)) + 100
