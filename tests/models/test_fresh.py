"""Fresh parameters: the numbers of `model.init`, from programs that alike parameters share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cropr_jax import models
from cropr_jax.core import trees
from cropr_jax.models import fresh

BASE = {"width": 16, "depth": 4, "heads": 2, "patch": 4, "image_size": 16, "num_classes": 3}
DENSE = BASE | {"head": "segmentation", "name": "eva02", "dtype": "bfloat16"}


def create(base=BASE, **reduction):
    return models.create(base | {"reduction": {"rate": 2, **reduction}})


MODELS = {
    "cropr": create(name="cropr", fusion="llf"),
    "sit": create(name="sit", fusion="none", options={"distill": True}),
    "patchmerger": create(name="patchmerger", fusion="none"),
    "cross-attention": create(DENSE, name="cropr", fusion="cross_attn"),
    "early exits": create(DENSE, fusion="dtop"),
    "slim": create(name="cropr", fusion="llf").clone(slim=True),
}


def whole(model, key):
    """What one compiled program of `model.init` gives."""

    def make(key):
        keys = jax.random.split(jax.random.key(0), 1)
        images = jnp.zeros((1, *model.image_size, 3))
        return model.init(key, {"image": images}, train=not model.slim, keys=keys)["params"]

    return jax.jit(make)(key)


@pytest.mark.parametrize(
    "name",
    [n if n == "cropr" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS],
)
def test_numbers_are_those_of_init(name):
    model, key = MODELS[name], jax.random.key(3)
    got, expected = models.init(model, key), whole(model, key)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    # Equal to the bit as XLA compiles by default; it may round otherwise with what tests leave out.
    for leaf, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_almost_equal_nulp(np.asarray(leaf), np.asarray(other), nulp=4)


def test_some_are_those_of_all():
    model, key = MODELS["cropr"], jax.random.key(1)
    every = trees.flatten(models.init(model, key))
    names = ["reducer_1/scorer/queries", "head/kernel"]
    some = trees.flatten(models.init_some(model, key, names))
    assert list(some) == names
    for name in names:
        np.testing.assert_array_equal(some[name], every[name])


def test_blocks_and_seeds_share_programs():
    """Neither twice the depth nor another seed compiles anything that was not compiled before."""
    models.init(MODELS["cropr"], jax.random.key(0))
    before = fresh._compiled.cache_info().misses
    models.init(MODELS["cropr"], jax.random.key(1))
    deeper = create(BASE | {"depth": 8}, name="cropr", fusion="llf")
    models.init(deeper, jax.random.key(0))
    assert fresh._compiled.cache_info().misses == before


def test_a_model_is_traced_once(monkeypatch):
    model = create(BASE | {"width": 20}, name="random", fusion="none")
    calls = []
    inner = type(model).input_shapes
    monkeypatch.setattr(type(model), "input_shapes", lambda *args: calls.append(1) or inner(*args))
    models.abstract_params(model)
    models.init(model, jax.random.key(0))
    models.abstract_params(model)
    assert len(calls) == 1
