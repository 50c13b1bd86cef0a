"""Every registered method goes through the same battery; a new one needs no line here.

First a site alone, then a small model with it. A method is spared a test only by what it says of
itself: `Pruner`, `keeps_positions`, `refuses_fusion`.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params
from jax.sharding import NamedSharding, PartitionSpec

from cropr_jax import models
from cropr_jax.core import rng
from cropr_jax.errors import ConfigError
from cropr_jax.reducers import Context, Pruner
from cropr_jax.reducers.registry import REDUCERS
from cropr_jax.tokens import from_features

NAMES = sorted(REDUCERS)
GRID, PATCHES, KEEP, WIDTH, HEADS, BATCH = (4, 4), 16, 11, 8, 2, 4
DEPTH, RATE = 3, 3
BASE = {"width": WIDTH, "depth": DEPTH, "heads": HEADS, "patch": 4, "image_size": 16}
COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


@jax.jit
def draw(seed=0):
    """Tokens, and all that any method may need."""
    keys = jax.random.split(jax.random.key(seed), 5)
    t = 1 + PATCHES
    x = jax.random.normal(keys[0], (BATCH, t, WIDTH))
    attention = jax.nn.softmax(2 * jax.random.normal(keys[1], (BATCH, HEADS, t)))
    context = Context(
        keys=rng.example_keys(keys[2], 0, jnp.arange(BATCH)),
        pixels=jax.random.uniform(keys[3], (BATCH, PATCHES, 12)),
        cls_row=attention,
        col_mean=attention.mean(1),
        col_mean_all=attention.mean(1),
        k_mean=x,
        v_norm=jax.random.uniform(keys[4], (BATCH, HEADS, t)),
    )
    return from_features(x, GRID, 1), context


@functools.cache
def site(name, keep=KEEP, dtype="float32"):
    """A function of tokens and context, its compiled form, and its inputs."""
    module = REDUCERS[name](num_outputs=3, dtype=jnp.dtype(dtype))
    tokens, context = draw()
    shapes = jax.eval_shape(
        lambda: module.init(jax.random.key(0), tokens, context, keep=keep, train=True)
    )
    params = jax.tree.map(
        lambda leaf: jnp.asarray(
            np.random.default_rng(0).normal(size=leaf.shape).astype(leaf.dtype)
        ),
        shapes,
    )

    def reduce(tokens, context):
        return module.apply(params, tokens, context, keep=keep, train=False)

    return reduce, jax.jit(reduce), tokens, context


@functools.cache
def case(name):
    """A model without fusion: its parameters, its compiled form, traces counted, and outputs."""
    traces = []
    model, params = build(name), params_of(name)

    @jax.jit
    def forward(images, keys):
        traces.append(name)
        return model.apply({"params": params}, images, keys=keys)

    return model, params, forward, traces, jax.device_get(forward(*batch()))


@functools.cache
def params_of(name):
    """Parameters of a model: the same ones with or without fusion, in any compute dtype."""
    return random_params(build(name))


def build(name, fusion="none", **fields):
    reduction = {"name": name, "rate": RATE, "fusion": fusion}
    fields = {"num_classes": 3, "pool": "mean_patches"} | fields
    return models.create(BASE | {"reduction": reduction} | fields)


def batch(seed=1):
    images = np.random.default_rng(seed).normal(size=(BATCH, 16, 16, 3)).astype(np.float32)
    return images, example_keys()


@jax.jit
def example_keys():
    return rng.example_keys(jax.random.key(2), 0, jnp.arange(BATCH))


@pytest.mark.parametrize("name", NAMES)
def test_site_counts_and_prefix(name):
    """What leaves a site is what the schedule says, with CLS in front bit by bit as it was."""
    _, compiled, tokens, context = site(name)
    kept, gone, _ = jax.device_get(compiled(tokens, context))
    assert kept.x.shape == (BATCH, 1 + KEEP, WIDTH) and kept.x.dtype == tokens.x.dtype
    assert kept.index.shape == (BATCH, KEEP) and kept.grid == GRID and kept.prefix == 1
    np.testing.assert_array_equal(kept.x[:, 0], np.asarray(tokens.x)[:, 0])
    assert np.isfinite(kept.x).all()
    for field in (kept.size, kept.valid):
        assert field is None or field.shape == (BATCH, 1 + KEEP)
    assert kept.position is None or kept.position.shape == (BATCH, KEEP, 2)
    if gone is not None:
        assert gone.x.shape == (BATCH, PATCHES - KEEP, WIDTH) and gone.prefix == 0


@pytest.mark.parametrize("name", NAMES)
def test_site_partition(name):
    """Pruners lose no patch; of merged ones every token holds a patch, and every patch has one."""
    _, compiled, tokens, context = site(name)
    kept, gone, _ = jax.device_get(compiled(tokens, context))
    index = kept.index
    if issubclass(REDUCERS[name], Pruner):
        every = np.concatenate([index, gone.index], axis=1)
        np.testing.assert_array_equal(np.sort(every, 1), np.tile(np.arange(PATCHES), (BATCH, 1)))
        rows = np.take_along_axis(np.asarray(tokens.x)[:, 1:], index[..., None], 1)
        np.testing.assert_array_equal(kept.x[:, 1:], rows)
        return
    assert REDUCERS[name]().refuses_fusion and gone is None
    if kept.group is not None:
        for group in kept.group:
            assert set(group) == set(range(KEEP))
    for row in index:
        known = row[row >= 0]
        assert len(set(known)) == len(known)


@pytest.mark.parametrize("name", [n for n in NAMES if REDUCERS[n].keeps_positions and n != "ats"])
def test_site_that_removes_nothing(name):
    """R = 0 is the identity, up to the order of tokens, for all whose tokens are patches.

    ATS prunes what is of no use whatever the budget.
    """
    _, compiled, tokens, context = site(name, PATCHES)
    kept, _, _ = jax.device_get(compiled(tokens, context))
    index = kept.index
    np.testing.assert_array_equal(np.sort(index, 1), np.tile(np.arange(PATCHES), (BATCH, 1)))
    rows = np.take_along_axis(np.asarray(tokens.x)[:, 1:], index[..., None], 1)
    np.testing.assert_allclose(kept.x[:, 1:], rows, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_site_compiled_is_eager_and_half_precision_chooses_the_same(name):
    reduce, compiled, tokens, context = site(name)
    kept, _, _ = compiled(tokens, context)
    eager, _, _ = reduce(tokens, context)
    np.testing.assert_array_equal(eager.index, kept.index)
    np.testing.assert_allclose(eager.x, kept.x, atol=1e-5)

    half = tokens.replace(x=tokens.x.astype(jnp.bfloat16))
    found, _, _ = site(name, KEEP, "bfloat16")[1](half, context)
    full, _, _ = compiled(half.replace(x=half.x.astype(jnp.float32)), context)
    np.testing.assert_array_equal(found.index, full.index)
    assert found.x.dtype == jnp.bfloat16 and np.isfinite(np.asarray(found.x)).all()


@pytest.mark.parametrize("name", NAMES)
def test_model_counts(name):
    model, _, _, _, (logits, out) = case(name)
    left = model.schedule.patches(PATCHES)
    assert left == (12, 9)
    assert logits.shape == (BATCH, 3) and logits.dtype == jnp.float32
    assert np.isfinite(logits).all()
    assert tuple(kept.shape[1] for kept in out["kept"]) == left
    counts = tuple(features.shape[1] for features in out["features"])
    before = REDUCERS[name]().hook == "middle"  # then the block itself gives off fewer
    assert counts == tuple(1 + m for m in ((*left, 9) if before else (PATCHES, *left)))
    if issubclass(REDUCERS[name], Pruner):
        assert set(np.unique(out["pruned_after"])) == {0, *model.schedule.blocks}
    if "group" in out:
        assert set(np.unique(out["group"])) == set(range(9))


@pytest.mark.parametrize("name", NAMES)
def test_examples_do_not_see_each_other_and_one_program_serves_all(name):
    _, _, forward, traces, (logits, _) = case(name)
    images, keys = batch()
    reverse, _ = jax.device_get(forward(images[::-1], keys[::-1]))
    np.testing.assert_allclose(reverse[::-1], logits, atol=1e-5)
    others, _ = batch(5)
    others[3] = images[3]
    found, _ = jax.device_get(forward(others, keys))
    np.testing.assert_allclose(found[3], logits[3], atol=1e-5)
    assert np.abs(found[2] - logits[2]).max() > 1e-5
    assert len(traces) == 1


@pytest.mark.parametrize("name", NAMES)
def test_slim_model_on_two_devices(name):
    """The inference form gives the same logits, and a batch that is cut communicates nothing."""
    model, params, _, _, (logits, out) = case(name)
    slim, slim_params = models.slim(model, params)
    assert jax.tree.structure(slim_params) == jax.tree.structure(models.abstract_params(slim))
    assert models.count(slim_params) <= models.count(params)

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=auto, devices=jax.devices()[:2])
    place, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    forward = jax.jit(
        lambda params, images, keys: slim.apply({"params": params}, images, keys=keys),
        in_shardings=(whole, place, place),
        out_shardings=place,
    )
    inputs = (slim_params, *batch())
    compiled = forward.lower(*inputs).compile()
    assert not re.search(f" ({COLLECTIVES})(-start)?\\(", compiled.as_text())
    found, slim_out = compiled(*jax.device_put(inputs, (whole, place, place)))
    np.testing.assert_allclose(found, logits, atol=1e-5)
    for one, other in zip(slim_out["kept"], out["kept"], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_trains_in_half_precision_with_fusion_or_says_why_not(name):
    """Finite, and with a constant image: variances and gradients of norms are at their edge."""
    fusion, reason = "llf", REDUCERS[name]().refuses_fusion
    if reason:
        with pytest.raises(ConfigError, match=f"{name!r} {re.escape(reason)}.* use 'none'"):
            build(name, "llf")
        fusion = "none"
    model = build(name, fusion, dtype="bfloat16", drop_path=0.2)
    images, keys = batch()
    images[0] = 0.5

    def loss(params, images, keys):
        logits, out = model.apply({"params": params}, images, train=True, keys=keys)
        return (logits**2).mean() + sum((aux**2).mean() for aux in out["auxiliary"]), out

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, out), gradients = jax.device_get(step(params_of(name), images, keys))
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    if fusion == "llf":
        assert out["features"][-1].shape[1] == 1 + PATCHES
        index = np.concatenate([out["kept"][-1], *out["pruned"]], axis=1)
        np.testing.assert_array_equal(np.sort(index, 1), np.tile(np.arange(PATCHES), (BATCH, 1)))


def test_methods_differ():
    """From the same backbone no two methods find the same, nor what is found without any."""
    plain = models.create(BASE | {"num_classes": 3, "pool": "mean_patches"})
    shared = {k: v for k, v in case("random")[1].items() if not k.startswith("reducer_")}
    logits, _ = jax.device_get(jax.jit(plain.apply)({"params": shared}, batch()[0]))
    found = {name: case(name)[4][0] for name in NAMES} | {"none": logits}
    for name in NAMES:
        backbone = {k: v for k, v in case(name)[1].items() if not k.startswith("reducer_")}
        assert jax.tree.all(jax.tree.map(np.array_equal, backbone, shared)), name
        for other in set(found) - {name}:
            assert np.abs(found[name] - found[other]).max() > 1e-4, (name, other)
