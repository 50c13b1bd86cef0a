"""The forward pass of inference, as predictors compile and export it."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cropr_jax.core import rng
from cropr_jax.models.trunk import Trunk


def forward(
    model: Trunk,
    normalize: tuple[Any, Any] | None,
    outputs: tuple[str, ...],
    params: Mapping[str, Any],
    images: jax.Array,
) -> tuple[Any, dict[str, Any]]:
    """The prediction for a batch, and those of `outputs` that the model has.

    Methods that draw at random use the same numbers in every call; image i of a batch has its own.

    Args:
      model: slim form.
      normalize: (mean, std) of values scaled to 0 .. 1, or None if the images are normalised.
      outputs: names in the model's `out`.
      params: of the model.
      images: [b, height, width, 3].
    """
    if normalize is not None:
        mean, std = normalize
        images = (images.astype(jnp.float32) / 255 - mean) / std
    keys = rng.example_keys(jax.random.key(0), 0, jnp.arange(images.shape[0]))
    prediction, out = model.apply({"params": params}, images, keys=keys)
    return prediction, {name: out[name] for name in outputs if name in out}
