"""The barrier in the backward pass: where it is, what it leaves alone, and that it holds."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from training import mesh_of

from cropr_jax import models
from cropr_jax.core.barrier import gradient_barrier
from cropr_jax.models import trunk

FIELDS = {
    "image_size": 8,
    "patch": 4,
    "width": 8,
    "depth": 2,
    "heads": 2,
    "num_classes": 3,
    "drop_path": 0.1,
}
REDUCTIONS = {
    "none": {"name": "none", "fusion": "none"},
    "cropr": {"name": "cropr", "rate": 1, "fusion": "llf"},
}


def gradient_of(model):
    """(parameters, images [b, h, w, 3], keys [b]) -> gradients of a made-up loss."""

    def loss(params, images, keys):
        logits, _ = model.apply({"params": params}, images, train=True, keys=keys)
        return (logits**2).sum()

    return jax.grad(loss)


def arguments(model, count=2):
    images = jax.random.normal(jax.random.key(1), (count, 8, 8, 3))
    return random_params(model), images, jax.random.split(jax.random.key(2), count)


def lowered(model, *platforms):
    shapes = jax.eval_shape(lambda: arguments(model))
    traced = jax.jit(gradient_of(model)).trace(*shapes)
    return traced.lower(lowering_platforms=platforms).as_text()


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_only_programs_for_cpu_have_it(name, remat, monkeypatch):
    model = models.create(FIELDS | {"reduction": REDUCTIONS[name], "remat": remat})
    other = lowered(model, "cuda"), lowered(model, "tpu")
    assert lowered(model, "cpu").count("stablehlo.while") == 2 * model.depth
    assert lowered(model, "cpu", "cuda", "tpu").count("stablehlo.while") == 2 * model.depth
    monkeypatch.setattr(trunk, "gradient_barrier", lambda x: x)
    assert other == (lowered(model, "cuda"), lowered(model, "tpu"))
    assert "stablehlo.while" not in lowered(model, "cpu")


def test_the_compiler_does_not_fuse_across_it():
    def f(x, barrier):
        for _ in range(4):
            x = jnp.tanh(barrier(x))
        return x.sum()

    def loops(barrier):
        text = jax.jit(jax.grad(lambda x: f(x, barrier))).lower(jnp.ones(8)).compile().as_text()
        return len(re.findall(r" while\(", text))

    assert (loops(gradient_barrier), loops(lambda x: x)) == (4, 0)


def gradients(model, how):
    params, images, keys = arguments(model)
    gradient = gradient_of(model)
    if how == "vmap":
        one = jax.vmap(lambda x, key: gradient(params, x[None], key[None]))
        return jax.tree.map(lambda g: g.sum(0), jax.jit(one)(images, keys))
    if how == "devices":
        mesh = mesh_of(2, 1)
        cut, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        gradient = jax.jit(gradient, in_shardings=(whole, cut, cut), out_shardings=whole)
    return jax.jit(gradient)(params, images, keys)


@pytest.mark.parametrize("how", ["plain", "remat", "vmap", "devices"])
def test_gradients_are_the_same(how, monkeypatch):
    model = models.create(FIELDS | {"reduction": REDUCTIONS["cropr"], "remat": how == "remat"})
    got = gradients(model, how)
    monkeypatch.setattr(trunk, "gradient_barrier", lambda x: x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        got,
        gradients(model, "plain"),
    )


def test_other_derivatives():
    def f(x):
        return (gradient_barrier(x) ** 3).sum()

    x = jnp.arange(3.0)
    np.testing.assert_allclose(jax.grad(f)(x), 3 * x**2)  # not under jit
    np.testing.assert_allclose(jax.jit(jax.hessian(f))(x), np.diag(6 * x))
    value, tangent = jax.jvp(f, (x,), (jnp.ones(3),))
    np.testing.assert_allclose((value, tangent), ((x**3).sum(), (3 * x**2).sum()))
