"""Rules of what moves values, and computes none."""

from typing import Any

import numpy as np

from cropr_jax.errors import ConfigError
from cropr_jax.models.to_onnx.graph import BATCH, Graph, Tensor
from cropr_jax.models.to_onnx.step import Rule, Step


def _reshape(graph: Graph, step: Step):
    return [graph.reshape(step.whole(graph)[0], step.out_shapes[0])]


def _transpose(graph: Graph, step: Step):
    return [graph.transpose(step.inputs[0], step.params["permutation"])]


def _broadcast_in_dim(graph: Graph, step: Step):
    shape: list[Any] = [1] * len(step.out_shapes[0])
    for place, size in zip(step.params["broadcast_dimensions"], step.inputs[0].shape, strict=True):
        shape[place] = size
    return [graph.reshape(step.inputs[0], tuple(shape))]


def _iota(graph: Graph, step: Step):
    (shape,), axis = step.out_shapes, step.params["dimension"]
    if shape[axis] == BATCH:
        return [Tensor("", shape, np.dtype(step.out_dtypes[0]), missing="iota over the batch")]
    place = [-1 if i == axis else 1 for i in range(len(shape))]
    return [graph.constant(np.arange(shape[axis]).reshape(place), step.out_dtypes[0])]


def _concatenate(graph: Graph, step: Step):
    axis = step.params["dimension"]
    return [
        graph.add("Concat", step.whole(graph), step.out_shapes[0], step.out_dtypes[0], axis=axis)
    ]


def _stack(graph: Graph, step: Step):
    axis = step.params["axis"]
    parts = [graph.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:])) for x in step.whole(graph)]
    return [graph.add("Concat", parts, step.out_shapes[0], step.out_dtypes[0], axis=axis)]


def _split(graph: Graph, step: Step):
    sizes = graph.constant(step.params["sizes"], np.int64)
    outputs = list(zip(step.out_shapes, step.out_dtypes, strict=True))
    inputs = [*step.whole(graph), sizes]
    return graph.add_many("Split", inputs, outputs, axis=step.params["axis"])


def _pad(graph: Graph, step: Step):
    x, value = step.whole(graph)
    low, high, inner = zip(*step.params["padding_config"], strict=True)
    if any(inner):
        raise ConfigError("format='onnx': padding between values has no rule; use format='jax'")
    pads = graph.constant([*low, *high], np.int64)
    return [graph.add("Pad", [x, pads, value], step.out_shapes[0], step.out_dtypes[0])]


RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "split": _split,
    "squeeze": _reshape,
    "stack": _stack,
    "transpose": _transpose,
}
