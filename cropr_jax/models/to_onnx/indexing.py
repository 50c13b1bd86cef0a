"""Rules of what takes a part, or puts into an order."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.lax import GatherDimensionNumbers, GatherScatterMode

from cropr_jax.errors import ConfigError
from cropr_jax.models.to_onnx.elementwise import without_nan
from cropr_jax.models.to_onnx.graph import BATCH, Graph, Shape, Tensor
from cropr_jax.models.to_onnx.step import Rule, Step


def _sort(graph: Graph, step: Step):
    """TopK of all, the least first: like a stable sort it leaves equal values in their order.

    A NaN comes last, as in JAX, but counts as equal to infinity.
    """
    if step.params["num_keys"] != 1:
        raise ConfigError("format='onnx': a sort by two keys has no rule; use format='jax'")
    operands, axis, shape = step.whole(graph), step.params["dimension"], step.shapes[0]
    if shape[axis] == BATCH:
        raise ConfigError("format='onnx': a sort of the batch has no rule; use format='jax'")
    key = without_nan(graph, operands[0], np.inf)
    count = graph.constant([shape[axis]], np.int64)
    outputs = [(shape, key.dtype), (shape, np.int64)]
    order = graph.add_many("TopK", [key, count], outputs, axis=axis, largest=0, sorted=1)[1]
    return [graph.add("GatherElements", [x, order], shape, x.dtype, axis=axis) for x in operands]


def _cut(
    graph: Graph,
    x: Tensor,
    starts: Sequence[int],
    limits: Sequence[Any],
    strides: Sequence[int],
    shape: Shape,
) -> Tensor:
    """A part of a tensor, of the given shape. What is taken whole is left out.

    Raises:
      ConfigError: if it is a part of the batch, whose size is not known.
    """
    bounds = list(zip(starts, limits, strides, strict=True))
    axes = [
        axis
        for axis, (size, (start, limit, stride)) in enumerate(zip(x.shape, bounds, strict=True))
        if (start, str(limit), stride) != (0, str(size), 1)
    ]
    if any(x.shape[axis] == BATCH for axis in axes):
        raise ConfigError("format='onnx': a part of the batch has no rule; use format='jax'")
    chosen = [[bounds[axis][i] for axis in axes] for i in range(3)]
    parts = [graph.constant(values, np.int64) for values in (*chosen[:2], axes, chosen[2])]
    return graph.add("Slice", [x, *parts], shape, x.dtype)


def _slice(graph: Graph, step: Step):
    starts, limits = step.params["start_indices"], step.params["limit_indices"]
    strides = step.params["strides"] or [1] * len(starts)
    return [_cut(graph, step.whole(graph)[0], starts, limits, strides, step.out_shapes[0])]


def _gather(graph: Graph, step: Step):
    """Its three uses, with indices that are within bounds.

    A part at a constant place; rows at constant places; and rows of each example in an order of its
    own.
    """
    numbers = step.params["dimension_numbers"]
    x, index = step.whole(graph)
    if index.array is not None and not numbers.operand_batching_dims:
        made = _at_constant_places(graph, step, x, index.array)
    elif _is_take(numbers) and step.params["mode"] == GatherScatterMode.PROMISE_IN_BOUNDS:
        rows = graph.cast(index, np.int64)
        made = graph.add("GatherND", [x, rows], step.out_shapes[0], x.dtype, batch_dims=1)
    else:
        made = None
    if made is None:
        raise ConfigError(f"format='onnx': a gather with {numbers} has no rule; use format='jax'")
    return [made]


def _is_take(numbers: GatherDimensionNumbers) -> bool:
    """Whether rows of the second dimension are taken, in an order for each of the first."""
    places = numbers.operand_batching_dims, numbers.start_index_map, numbers.collapsed_slice_dims
    return places == ((0,), (1,), (1,))


def _at_constant_places(graph: Graph, step: Step, x: Tensor, index: np.ndarray) -> Tensor | None:
    """The part or the rows of `x` that a constant index names; None if it is neither.

    Args:
      graph: to add to.
      step: the gather.
      x: its operand.
      index: [*places, axes].
    """
    numbers, (shape,) = step.params["dimension_numbers"], step.out_shapes
    sizes = tuple(s if isinstance(s, int) else BATCH for s in step.params["slice_sizes"])
    axes = numbers.start_index_map
    if any(x.shape[axis] == BATCH for axis in axes):
        return None
    if not ((index >= 0) & (index <= [x.shape[axis] - sizes[axis] for axis in axes])).all():
        return None
    if index.ndim == 1:
        starts = [0] * len(sizes)
        for axis, start in zip(axes, index.tolist(), strict=True):
            starts[axis] = start
        limits = [
            n if isinstance(n, str) else start + n for start, n in zip(starts, sizes, strict=True)
        ]
        return graph.reshape(_cut(graph, x, starts, limits, [1] * len(sizes), sizes), shape)
    axis, last = axes[0], axes[0] + index.ndim - 1
    one_row = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    around = (*range(axis), *range(last, len(shape)))  # the dimensions beside that of the rows
    if sizes == one_row and (numbers.collapsed_slice_dims, numbers.offset_dims) == (axes, around):
        rows = graph.constant(index[..., 0], np.int64)
        return graph.add("Gather", [x, rows], shape, x.dtype, axis=axis)
    return None


RULES: dict[str, Rule] = {"gather": _gather, "slice": _slice, "sort": _sort}
