"""Parameters of models: fresh ones, their shapes, and those of the slim inference form."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cropr_jax.core import trees
from cropr_jax.core.schedule import Schedule
from cropr_jax.models import fresh
from cropr_jax.models.trunk import Trunk
from cropr_jax.reducers.registry import method


def init(model: Trunk, key: jax.Array) -> dict[str, Any]:
    """All parameters of the model, float32; the training form unless the model is slim."""
    return init_some(model, key, trees.flatten(abstract_params(model)))


def init_some(model: Trunk, key: jax.Array, names: Iterable[str]) -> dict[str, Any]:
    """Those of the parameters of `init` that have one of these '/'-joined names, as a tree."""
    traced = fresh.trace(model)
    places = {name: place for place, name in enumerate(_names(traced.shapes))}
    chosen = list(names)
    drawn = fresh.draw(traced, key, [places[name] for name in chosen])
    return trees.unflatten(dict(zip(chosen, drawn, strict=True)))


def _names(tree: Mapping[str, Any]) -> list[str]:
    """'/'-joined names in the order of the leaves of a tree."""
    paths, _ = jax.tree.flatten_with_path(tree)
    return ["/".join(step.key for step in path) for path, _ in paths]


def abstract_params(model: Trunk) -> dict[str, Any]:
    """Shapes and dtypes of all parameters, without computing anything.

    Tracing a large model takes seconds, and many ask: that is done once for each.
    """
    return jax.tree.map(lambda leaf: leaf, fresh.trace(model).shapes)


def slim(model: Trunk, params: Mapping[str, Any]) -> tuple[Trunk, dict[str, Any]]:
    """The inference form of a model: no auxiliary parameters, one query per site.

    Returns:
      The model with `slim` set, and its parameters. Logits and kept sets are those of `model`.
    """
    if model.slim:
        return model, dict(params)
    return model.clone(slim=True), slim_params(model, params)


def slim_params(model: Trunk, params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the slim model; works on arrays and under `jax.eval_shape`."""
    slimmed = {}
    for name, value in params.items():
        if trees.of_site(name):
            value = method(model.reduction).slim_params(value)
        slimmed[name] = value
    return slimmed


def unpruned(model: Trunk) -> Trunk:
    """The same backbone and head without reducers, fusion and drop path."""
    return model.clone(
        reduction="none",
        reducer_options=(),
        schedule=Schedule(model.depth),
        fusion="none",
        drop_path=0.0,
        drop_path_last_block=0.0,
    )


def cast_params(model: Trunk, params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters in the dtype in which the model uses them (`Trunk.full_precision`).

    All that is not float32 would else be cast in every call. Predictions do not change.
    """
    return trees.unflatten(
        {
            name: leaf if model.full_precision(name) else jnp.asarray(leaf, model.dtype)
            for name, leaf in trees.flatten(params).items()
        }
    )


def slim_leaves(model: Trunk) -> dict[str, Any]:
    """The part of the training tree that the slim parameters are made of, as shapes.

    Found by tracing `slim_params`: what it does not read, inference does not need.
    """
    params = trees.flatten(abstract_params(model))
    names, leaves = tuple(params), tuple(params.values())

    def slimmed(*leaves: jax.Array) -> Any:
        tree = trees.unflatten(dict(zip(names, leaves, strict=True)))
        return slim_params(model, tree)

    jaxpr = jax.make_jaxpr(slimmed)(*leaves).jaxpr
    used = {id(var) for eqn in jaxpr.eqns for var in eqn.invars} | set(map(id, jaxpr.outvars))
    return trees.unflatten(
        {
            name: leaf
            for name, leaf, var in zip(names, leaves, jaxpr.invars, strict=True)
            if id(var) in used
        }
    )
