"""What every method says of its losses is what it has."""

import jax
import jax.numpy as jnp
import pytest

from cropr_jax import models
from cropr_jax.core import rng
from cropr_jax.reducers.registry import REDUCERS


@pytest.mark.parametrize("name", sorted(REDUCERS))
def test_losses_in_words(name):
    model = models.create(
        {"width": 8, "depth": 3, "heads": 2, "patch": 4, "image_size": 16, "num_classes": 3}
        | {"reduction": {"name": name, "rate": 3, "fusion": "none"}}
    )

    def losses(params):
        keys = rng.example_keys(jax.random.key(0), 0, jnp.arange(2))
        images = jnp.zeros((2, 16, 16, 3))
        _, out = model.apply({"params": params}, images, train=True, keys=keys)
        return model.reducer_losses(out, lambda logits, places: logits.sum())

    found = jax.eval_shape(losses, models.abstract_params(model))
    assert bool(found) == bool(model.make_reducer().describe_losses)
