"""What inference needs of trained parameters: which of them, and in which dtype."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from cropr_jax import models
from cropr_jax.models.vit import ViT


def cast_params(model: ViT, params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters in the dtype in which the model uses them.

    Norms and reducers compute with float32 parameters whatever the compute dtype; all else would be
    cast in every call. Logits do not change.
    """

    flat = traverse_util.flatten_dict(dict(params), sep="/")
    return traverse_util.unflatten_dict(
        {
            name: leaf
            if name.startswith("reducer_") or "norm" in name
            else jnp.asarray(leaf, model.dtype)
            for name, leaf in flat.items()
        },
        sep="/",
    )


def slim_leaves(model: ViT) -> dict[str, Any]:
    """The part of the training tree that the slim parameters are made of, as shapes.

    Found by tracing `models.slim_params`: what it does not read, inference does not need.
    """
    params = traverse_util.flatten_dict(models.abstract_params(model))
    names, leaves = tuple(params), tuple(params.values())

    def slim(*leaves: jax.Array) -> Any:
        tree = traverse_util.unflatten_dict(dict(zip(names, leaves, strict=True)))
        return models.slim_params(model, tree)

    jaxpr = jax.make_jaxpr(slim)(*leaves).jaxpr
    used = {id(var) for eqn in jaxpr.eqns for var in eqn.invars} | set(map(id, jaxpr.outvars))
    return traverse_util.unflatten_dict(
        {
            name: leaf
            for name, leaf, var in zip(names, leaves, jaxpr.invars, strict=True)
            if id(var) in used
        }
    )
