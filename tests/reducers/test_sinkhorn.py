"""Sinkhorn: the reference's numbers, the plan's marginals, its limits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokred
from conftest import fixture_names, load_fixture

from cropr_jax.reducers.sinkhorn import Sinkhorn, transport, unit

KEEP, TOKENS, WIDTH = 3, 8, 5


@pytest.fixture
def x():
    return 3 * normal(0, 2, TOKENS, WIDTH)


@pytest.fixture
def similarity():
    return np.random.default_rng(2).uniform(-1, 1, (2, KEEP, TOKENS)).astype(np.float32)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def apply(module, centres, x):
    return module.apply({"params": {"centres": centres}}, x, KEEP, method="mix")


def mix(x, **options):
    """Outputs and weights with fixed centres."""
    weights, values = jax.device_get(apply(Sinkhorn(**options), normal(1, KEEP, WIDTH), x))
    return weights @ values, weights


plan_of = jax.jit(transport, static_argnums=1)


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("tokred_sinkhorn"))
def test_reference(name):
    arrays, meta = load_fixture(name)
    model = tokred.build(meta, "sinkhorn", meta["config"]["cluster_count"])
    args = meta["config"]["args"]
    options = {"epsilon": args["sinkhorn_eps"], "iterations": args["cluster_iters"]}
    model = model.clone(reducer_options=tuple(options.items()))
    params = tokred.params(arrays, meta, "cluster_layers", lambda w: {"centres": w["v"]})
    _, out = tokred.run(model, params, arrays)
    for site, block in enumerate(args["reduction_loc"]):
        weights = arrays[f"out/reduce.{site}/out1"]
        np.testing.assert_allclose(out["sites"][site]["weights"], weights, atol=tokred.TOKENS)
        hard = out["sites"][site]["weights"].argmax(1)
        np.testing.assert_array_equal(hard, arrays[f"out/viz.{block}/Assignment_Maps"])


def test_marginals(similarity):
    plan = np.asarray(plan_of(similarity, 3))
    assert (plan >= 0).all()
    np.testing.assert_allclose(plan.sum(1), 1, atol=1e-6)
    np.testing.assert_allclose(plan.sum(2), TOKENS / KEEP, atol=1e-2)
    np.testing.assert_allclose(plan_of(similarity, 20).sum(2), TOKENS / KEEP, atol=1e-5)


def test_plan_in_the_plain_way(similarity):
    """Rows and columns of exp(similarity) rescaled in turn."""
    plan = np.exp(similarity.astype(np.float64))
    for _ in range(3):
        plan /= plan.sum(2, keepdims=True)
        plan /= plan.sum(1, keepdims=True)
    np.testing.assert_allclose(plan_of(similarity, 3), plan, atol=1e-6)


def test_limits(similarity):
    np.testing.assert_allclose(plan_of(0 * similarity, 3), 1 / KEEP, atol=1e-6)
    np.testing.assert_allclose(plan_of(similarity / 1e4, 3), 1 / KEEP, atol=1e-3)
    # Not compiled as a whole: the iterations are unrolled.
    sharp = np.asarray(transport(jnp.asarray(similarity / np.float32(1e-3)), 200))
    assert np.isfinite(sharp).all()
    # All but k - 1 tokens go to one centre whole: a vertex of the transport polytope.
    assert ((sharp > 0.99).any(1).sum(1) >= TOKENS - KEEP + 1).all()


def test_what_is_mixed(x):
    """Unit vectors with weights of m / k by default; the tokens themselves, averaged, on demand."""
    units = x / np.linalg.norm(x, axis=-1, keepdims=True)
    mixed, weights = mix(x)
    np.testing.assert_allclose(mixed, weights @ units, atol=1e-5)
    np.testing.assert_allclose(
        mix(x * np.arange(1, 9, dtype=np.float32)[:, None])[0], mixed, atol=1e-5
    )

    averages, weights = mix(x, unit_values=False, averages=True)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(averages, weights @ x, atol=1e-5)
    assert (averages <= x.max(1, keepdims=True)).all()
    assert (averages >= x.min(1, keepdims=True)).all()


def test_order_of_the_inputs_does_not_matter(x):
    np.testing.assert_allclose(mix(x[:, ::-1])[0], mix(x)[0], atol=1e-5)


def test_gradients_reach_centres_and_survive_a_zero_token(x):
    def loss(centres, x):
        weights, values = apply(Sinkhorn(), centres, x)
        return ((weights @ values) ** 2).sum()

    x[0, 0] = 0
    gradients = jax.device_get(jax.jit(jax.grad(loss, (0, 1)))(normal(1, KEEP, WIDTH), x))
    assert all(np.isfinite(g).all() for g in gradients)
    assert np.abs(gradients[0]).max() > 1e-4
    np.testing.assert_array_equal(jax.jit(unit)(np.zeros((1, 4), np.float32)), 0)
