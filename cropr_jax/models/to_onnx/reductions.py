"""Rules of what is taken over a dimension, or over several: sums, extremes and their places."""

import functools

import numpy as np

from cropr_jax.models.to_onnx.elementwise import check_logical, without_nan
from cropr_jax.models.to_onnx.graph import Graph
from cropr_jax.models.to_onnx.step import Rule, Step


def _reduce(op: str, graph: Graph, step: Step):
    axes = graph.constant(step.params["axes"], np.int64)
    inputs = [*step.whole(graph), axes]
    return [graph.add(op, inputs, step.out_shapes[0], step.out_dtypes[0], keepdims=0)]


def _reduce_or(graph: Graph, step: Step):
    """A maximum; onnxruntime has none of truth values."""
    check_logical(step)
    axes = graph.constant(step.params["axes"], np.int64)
    counted = graph.cast(step.whole(graph)[0], np.int32)
    most = graph.add("ReduceMax", [counted, axes], step.out_shapes[0], np.int32, keepdims=0)
    return [graph.cast(most, bool)]


def _place(op: str, replacement: float, graph: Graph, step: Step):
    """The place of the first extreme value.

    A NaN is the extreme of its row, as in JAX, but counts as equal to infinity.
    """
    x = step.whole(graph)[0]
    x = graph.cast(x, np.int32) if x.dtype == np.bool_ else without_nan(graph, x, replacement)
    (axis,), (shape,) = step.params["axes"], step.out_shapes
    made = graph.add(op, [x], shape, np.int64, axis=axis, keepdims=0)
    return [graph.cast(made, step.out_dtypes[0])]


def _cumsum(graph: Graph, step: Step):
    inputs = [*step.whole(graph), graph.constant(step.params["axis"], np.int64)]
    reverse = int(step.params["reverse"])
    return [graph.add("CumSum", inputs, step.out_shapes[0], step.out_dtypes[0], reverse=reverse)]


RULES: dict[str, Rule] = {
    "argmax": functools.partial(_place, "ArgMax", np.inf),
    "argmin": functools.partial(_place, "ArgMin", -np.inf),
    "cumsum": _cumsum,
    "reduce_max": functools.partial(_reduce, "ReduceMax"),
    "reduce_min": functools.partial(_reduce, "ReduceMin"),
    "reduce_or": _reduce_or,
    "reduce_sum": functools.partial(_reduce, "ReduceSum"),
}
