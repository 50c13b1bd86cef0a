"""EVA-02: published sizes, positions under pruning, every reducer, what is refused."""

import functools
import re

import jax
import numpy as np
import pytest
from conftest import random_params

from cropr_jax import models
from cropr_jax.core import rng
from cropr_jax.errors import ConfigError
from cropr_jax.models.blocks import Block
from cropr_jax.reducers import Pruner
from cropr_jax.reducers.registry import REDUCERS
from cropr_jax.tokens import from_features

DEPTH, RATE = 3, 3
GRID = (3, 5)
TINY = {
    "name": "eva02",
    "width": 16,
    "depth": DEPTH,
    "heads": 2,
    "patch": 4,
    "image_size": (12, 20),
    "num_classes": 5,
}


def build(reduction="cropr", fusion="llf", options=None, **fields):
    made = {"name": reduction, "rate": RATE, "fusion": fusion, "options": options or {}}
    return models.create(TINY | {"reduction": made} | fields)


example_keys = jax.jit(rng.example_keys)


def batch(count=2):
    images = np.random.default_rng(1).normal(size=(count, 12, 20, 3)).astype(np.float32)
    return images, example_keys(jax.random.key(2), 0, np.arange(count))


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, images, keys):
    return model.apply({"params": params}, images, keys=keys)


# (variant, image size, classes): parameters of timm's and baaivision/EVA's models.
COUNTS = {
    ("ti", 336, 1000): 5_756_584,
    ("s", 336, 1000): 22_129_000,
    ("b", 448, 21_841): 103_144_273,
    ("l", 448, 21_841): 326_442_257,
    ("l", 224, 0): 303_268_800,
}


@pytest.mark.parametrize("case", COUNTS)
def test_parameters(case):
    variant, size, classes = case
    fields = {"name": "eva02", "variant": variant, "image_size": size, "num_classes": classes}
    model = models.create(fields)
    assert models.count(models.abstract_params(model)) == COUNTS[case]
    assert model.hidden == {"ti": 512, "s": 1024, "b": 2048, "l": 2730}[variant]


def test_names_of_parameters():
    model = build(layer_scale=0.1)
    params = models.abstract_params(model)
    shapes = jax.tree.map(lambda leaf: leaf.shape, params["block_0"])
    linear = {"kernel": (16, 42), "bias": (42,)}
    head = {"kernel": (16, 2, 8), "bias": (2, 8)}
    norm = {"scale": (16,), "bias": (16,)}
    assert shapes == {
        "norm1": norm,
        "attn": {
            "query": head,
            "key": {"kernel": (16, 2, 8)},
            "value": head,
            "out": {"kernel": (2, 8, 16), "bias": (16,)},
        },
        "layer_scale1": {"gamma": (16,)},
        "norm2": norm,
        "mlp": {
            "gate": linear,
            "up": linear,
            "norm": {"scale": (42,), "bias": (42,)},
            "down": {"kernel": (42, 16), "bias": (16,)},
        },
        "layer_scale2": {"gamma": (16,)},
    }
    assert "norm" not in models.abstract_params(build(mlp="swiglu"))["block_0"]["mlp"]
    # The aggregator's MLP is the plain ViT's on every backbone.
    aggregator = params["reducer_0"]["aggregator"]["mlp"]
    assert aggregator["fc1"]["kernel"].shape == (16, 64)


def test_without_classes_there_is_no_head():
    model = build("none", num_classes=0)
    params = random_params(model)
    assert "head" not in params and "fc_norm" in params
    found, out = forward(model, params, *batch())
    np.testing.assert_array_equal(found, out["pre_logits"])
    assert found.shape == (2, 16)


# A block in NumPy, written from the formulas: what the model computes must not depend on where in
# the sequence a token stands, only on the row and column given here.


def normalize(x, p):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-6) * p["scale"] + p["bias"]


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def turn(x, index, grid, reference):
    """Complex multiplication of neighbouring channels of [t, h, k]; CLS comes first, unturned."""
    count = x.shape[-1] // 4
    theta = 10_000.0 ** (-np.arange(count) / count)
    row, column = index // grid[1] * reference / grid[0], index % grid[1] * reference / grid[1]
    angles = np.concatenate([row[:, None] * theta, column[:, None] * theta], axis=1)
    angles = np.concatenate([np.zeros((1, 2 * count)), angles])
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def attention_matrix(x, index, p, grid=GRID, reference=16):
    """[h, t, t] of normalised tokens."""
    query = np.einsum("td,dhk->thk", x, p["query"]["kernel"]) + p["query"]["bias"]
    key = np.einsum("td,dhk->thk", x, p["key"]["kernel"])
    query, key = (turn(value, index, grid, reference) for value in (query, key))
    return softmax(np.einsum("thk,shk->hts", query, key) / np.sqrt(query.shape[-1]))


def block(x, index, p):
    """One EVA-02 block of one image: x is [1 + n, d], index the n raster positions."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), p)
    attn, mlp = p["attn"], p["mlp"]
    normed = normalize(np.asarray(x, np.float64), p["norm1"])
    value = np.einsum("td,dhk->thk", normed, attn["value"]["kernel"]) + attn["value"]["bias"]
    mixed = np.einsum("hts,shk->thk", attention_matrix(normed, index, attn), value)
    x = x + np.einsum("thk,hkd->td", mixed, attn["out"]["kernel"]) + attn["out"]["bias"]
    normed = normalize(x, p["norm2"])
    gate, up = (normed @ mlp[name]["kernel"] + mlp[name]["bias"] for name in ("gate", "up"))
    hidden = normalize(gate / (1 + np.exp(-gate)) * up, mlp["norm"])
    return x + hidden @ mlp["down"]["kernel"] + mlp["down"]["bias"]


def test_kept_and_fused_tokens_use_their_original_positions():
    model = build()
    params = random_params(model)
    _, out = jax.device_get(forward(model, params, *batch(1)))
    features = [leaf[0] for leaf in out["features"]]
    kept, pruned = out["kept"][0][0], out["pruned"][0][0]
    assert len(kept) == 11 and (np.diff(kept) < 0).any()  # they do not stand in raster order

    # The block after the site, and the last block, after Last Layer Fusion.
    after = features[0][[0, *(kept + 1)]]
    fused = np.concatenate([features[1], features[0][pruned + 1]])
    for number, x, index in ((1, after, kept), (2, fused, np.concatenate([kept, pruned]))):
        p = params[f"block_{number}"]
        np.testing.assert_allclose(features[number], block(x, index, p), atol=5e-5)
        renumbered = block(x, np.arange(len(index)), p)
        assert np.abs(features[number] - renumbered).max() > 1e-3


@pytest.mark.parametrize("source", ["cls_row", "col_mean"])
def test_attention_that_ranks_is_that_of_rotated_queries_and_keys(source):
    model = build("attn_topk", options={"source": source})
    params = random_params(model)
    _, out = jax.device_get(forward(model, params, *batch(1)))
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["block_0"])
    normed = normalize(np.asarray(out["embedded"][0], np.float64), p["norm1"])
    matrix = attention_matrix(normed, np.arange(15), p["attn"]).mean(0)[:, 1:]
    received = matrix[0] if source == "cls_row" else matrix[1:].mean(0)
    order = np.concatenate([out["kept"][0][0], out["pruned"][0][0]])
    np.testing.assert_array_equal(order, np.argsort(-received))


def both_halves(module, tokens):
    return module.feed_forward(module.attend(tokens, None)[0], None).x


def test_permuting_tokens_with_their_positions_permutes_the_output():
    module = Block(
        heads=2, hidden=42, mlp="swiglu_norm", use_key_bias=False, rope_reference=(16, 16), prefix=1
    )
    draw = np.random.default_rng(0)
    x = draw.normal(size=(2, 16, 16)).astype(np.float32)
    tokens = jax.device_get(jax.jit(from_features, static_argnums=(1, 2))(x, GRID, 1))
    params = jax.jit(functools.partial(module.init, method=both_halves))(jax.random.key(1), tokens)
    compiled = jax.jit(functools.partial(module.apply, method=both_halves))
    order = draw.permutation(15)
    shuffle = np.concatenate([[0], order + 1])

    def apply(*of):
        return np.asarray(compiled(*of))

    found = apply(params, tokens)
    moved = tokens.replace(x=x[:, shuffle], index=tokens.index[:, order])
    np.testing.assert_allclose(apply(params, moved), found[:, shuffle], atol=1e-5)
    # The same by rows and columns instead of raster indices.
    position = jax.jit(type(moved).coordinates)(moved)
    placed = moved.replace(position=position, index=np.full_like(moved.index, -1))
    np.testing.assert_allclose(apply(params, placed), found[:, shuffle], atol=1e-5)
    without = tokens.replace(x=x[:, shuffle])
    assert np.abs(apply(params, without) - found[:, shuffle]).max() > 1e-2


@pytest.mark.parametrize("name", sorted(n for n in REDUCERS if REDUCERS[n].keeps_positions))
def test_every_reducer_that_keeps_positions_works(name):
    model = build(name, "none" if REDUCERS[name]().refuses_fusion else "llf")
    params = random_params(model)
    images, keys = batch()
    logits, out = forward(model, params, images, keys)
    assert np.isfinite(logits).all()
    if model.fusion == "none":
        return
    index = np.concatenate([out["kept"][-1], *out["pruned"]], axis=1)
    np.testing.assert_array_equal(np.sort(index, axis=1), np.tile(np.arange(15), (2, 1)))
    if name == "cropr":
        found, slim_out = forward(*models.slim(model, params), images, keys)
        np.testing.assert_allclose(found, logits, atol=1e-5)
        np.testing.assert_array_equal(slim_out["kept"][0], out["kept"][0])


def test_gradients_are_finite_in_bfloat16():
    model = build(dtype="bfloat16", drop_path=0.2, layer_scale=0.1)
    params = random_params(model)

    def loss(params, images, keys):
        logits, out = model.apply({"params": params}, images, train=True, keys=keys)
        return (logits**2).mean() + sum((aux**2).mean() for aux in out["auxiliary"])

    value, gradients = jax.device_get(jax.jit(jax.value_and_grad(loss))(params, *batch()))
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert np.abs(gradients["block_0"]["attn"]["key"]["kernel"]).max() > 0


class Nowhere(Pruner):
    """A method whose tokens stand for no place."""

    keeps_positions = False


def test_methods_without_positions_are_refused(monkeypatch):
    monkeypatch.setitem(REDUCERS, "nowhere", Nowhere)
    with pytest.raises(ConfigError, match="reduction.name: 'nowhere' .* rotary embeddings"):
        build("nowhere", "none")
    with pytest.raises(ConfigError, match="reduction.fusion: 'nowhere' keeps no positions"):
        build("nowhere", "llf", name="vit")
    assert build("nowhere", "none", name="vit").reduction == "nowhere"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 3}, "model.heads: 3 heads do not divide the width 16"),
        ({"heads": 0}, "model.heads: found 0, expected a whole"),
        ({"heads": 8}, "model.heads: rotary embeddings need a head width divisible by 4, found 2"),
        ({"options": {"heads": 5}}, "model.reduction.options.heads: 5 heads do not divide"),
        ({"mlp": "relu"}, "model.mlp: found 'relu', expected one of 'gelu'"),
        ({"variant": "h"}, "model.variant: found 'h', expected one of 'ti', 's', 'b', 'l'"),
        ({"name": "eva01"}, "model.name: found 'eva01', expected one of 'vit', 'eva02'"),
        ({"width": None}, "model.width is missing: set it, or model.variant"),
    ],
)
def test_impossible_models_name_the_field(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(**fields)
