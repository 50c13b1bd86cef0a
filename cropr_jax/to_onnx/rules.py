"""What each primitive of a vision transformer at inference is in ONNX, in a few lines each.

A new primitive is one rule. Source of the operators: onnx/onnx: docs/Operators.md.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cropr_jax.errors import ConfigError
from cropr_jax.to_onnx.graph import BATCH, Graph, Shape, Tensor


@dataclasses.dataclass(frozen=True)
class Step:
    """An equation of the jaxpr: what rules read.

    Attributes:
      inputs: as they lie in the graph.
      shapes: of the inputs by the jaxpr, broadcasts carried out.
      out_shapes, out_dtypes: of the outputs by the jaxpr.
      params: of the primitive.
    """

    inputs: list[Tensor]
    shapes: list[Shape]
    out_shapes: list[Shape]
    out_dtypes: list[Any]
    params: Mapping[str, Any]

    def whole(self, graph: Graph) -> list[Tensor]:
        """Inputs with broadcasts carried out."""
        return [graph.full(x, shape) for x, shape in zip(self.inputs, self.shapes, strict=True)]


Rule = Callable[[Graph, Step], list[Tensor]]
RULES: dict[str, Rule] = {}

# Primitives that are one operator on each element.
ELEMENTWISE = {
    "abs": "Abs",
    "add": "Add",
    "and": "And",
    "cos": "Cos",
    "eq": "Equal",
    "erf": "Erf",
    "exp": "Exp",
    "floor": "Floor",
    "ge": "GreaterOrEqual",
    "gt": "Greater",
    "le": "LessOrEqual",
    "log": "Log",
    "logistic": "Sigmoid",
    "lt": "Less",
    "max": "Max",
    "min": "Min",
    "neg": "Neg",
    "not": "Not",
    "or": "Or",
    "pow": "Pow",
    "sign": "Sign",
    "sin": "Sin",
    "sqrt": "Sqrt",
    "sub": "Sub",
    "tanh": "Tanh",
}


def rule(name: str) -> Callable[[Rule], Rule]:
    """Registers the rule of a primitive."""

    def register(function: Rule) -> Rule:
        RULES[name] = function
        return function

    return register


def common(tensors: Sequence[Tensor]) -> Shape:
    """The shape to which tensors of one rank (or scalars) are broadcast."""
    ranked = [tensor.shape for tensor in tensors if tensor.shape]
    return tuple(
        next((size for size in sizes if size != 1), 1) for sizes in zip(*ranked, strict=True)
    )


def elementwise(graph: Graph, op: str, inputs: Sequence[Tensor], dtype: Any, **attributes: Any):
    """A node that broadcasts its inputs."""
    return graph.add(op, inputs, common(inputs), dtype, **attributes)


for _primitive, _op in ELEMENTWISE.items():
    RULES[_primitive] = lambda graph, step, op=_op: [
        elementwise(graph, op, step.inputs, step.out_dtypes[0])
    ]


@rule("div")
def _div(graph: Graph, step: Step):
    """A quotient; exp(x) over its sum along the last dimension becomes Softmax."""
    top, bottom = step.inputs
    dtype = step.out_dtypes[0]
    exponent = graph.origin(top, "Exp")
    total = graph.origin(next(iter(graph.origin(bottom, "Reshape")), None), "ReduceSum")
    if exponent and total and total[0] is top and bottom.shape == (*top.shape[:-1], 1):
        logits = exponent[0]
        shifted = graph.origin(logits, "Sub")
        # Softmax does not see what is taken from all of a row.
        if shifted and shifted[0].shape == top.shape and shifted[1].shape[-1:] == (1,):
            logits = shifted[0]
        return [elementwise(graph, "Softmax", [logits], dtype, axis=-1)]
    return [elementwise(graph, "Div", step.inputs, dtype)]


@rule("mul")
def _mul(graph: Graph, step: Step):
    """A product; x / 2 times 1 + erf(x / sqrt 2) becomes Gelu."""
    half, gate = step.inputs
    x = graph.partner(half, "Mul", 0.5)
    erf = graph.origin(graph.partner(gate, "Add", 1.0), "Erf")
    if x and erf and graph.partner(erf[0], "Mul", 2**-0.5) is x:
        return [elementwise(graph, "Gelu", [x], step.out_dtypes[0])]
    return [elementwise(graph, "Mul", step.inputs, step.out_dtypes[0])]


@rule("ne")
def _ne(graph: Graph, step: Step):
    equal = elementwise(graph, "Equal", step.inputs, bool)
    return [elementwise(graph, "Not", [equal], bool)]


@rule("rem")
def _rem(graph: Graph, step: Step):
    return [elementwise(graph, "Mod", step.inputs, step.out_dtypes[0], fmod=1)]


@rule("rsqrt")
def _rsqrt(graph: Graph, step: Step):
    root = elementwise(graph, "Sqrt", step.inputs, step.out_dtypes[0])
    return [elementwise(graph, "Reciprocal", [root], step.out_dtypes[0])]


@rule("square")
def _square(graph: Graph, step: Step):
    return [elementwise(graph, "Mul", step.inputs * 2, step.out_dtypes[0])]


@rule("integer_pow")
def _integer_pow(graph: Graph, step: Step):
    exponent = graph.constant(step.params["y"], step.out_dtypes[0])
    return [elementwise(graph, "Pow", [*step.inputs, exponent], step.out_dtypes[0])]


@rule("select_n")
def _select_n(graph: Graph, step: Step):
    which, on_false, on_true = step.inputs
    return [elementwise(graph, "Where", [which, on_true, on_false], step.out_dtypes[0])]


@rule("convert_element_type")
def _convert(graph: Graph, step: Step):
    return [graph.cast(step.inputs[0], step.out_dtypes[0])]


@rule("stop_gradient")
def _stop_gradient(graph: Graph, step: Step):
    return step.inputs


@rule("reshape")
def _reshape(graph: Graph, step: Step):
    return [graph.reshape(step.whole(graph)[0], step.out_shapes[0])]


RULES["squeeze"] = _reshape


@rule("transpose")
def _transpose(graph: Graph, step: Step):
    return [graph.transpose(step.inputs[0], step.params["permutation"])]


@rule("broadcast_in_dim")
def _broadcast_in_dim(graph: Graph, step: Step):
    shape: list[Any] = [1] * len(step.out_shapes[0])
    for place, size in zip(step.params["broadcast_dimensions"], step.inputs[0].shape, strict=True):
        shape[place] = size
    return [graph.reshape(step.inputs[0], tuple(shape))]


@rule("iota")
def _iota(graph: Graph, step: Step):
    (shape,), axis = step.out_shapes, step.params["dimension"]
    if shape[axis] == BATCH:
        return [Tensor("", shape, np.dtype(step.out_dtypes[0]), missing="iota over the batch")]
    place = [-1 if i == axis else 1 for i in range(len(shape))]
    return [graph.constant(np.arange(shape[axis]).reshape(place), step.out_dtypes[0])]


@rule("concatenate")
def _concatenate(graph: Graph, step: Step):
    axis = step.params["dimension"]
    return [
        graph.add("Concat", step.whole(graph), step.out_shapes[0], step.out_dtypes[0], axis=axis)
    ]


@rule("stack")
def _stack(graph: Graph, step: Step):
    axis = step.params["axis"]
    parts = [graph.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:])) for x in step.whole(graph)]
    return [graph.add("Concat", parts, step.out_shapes[0], step.out_dtypes[0], axis=axis)]


@rule("pad")
def _pad(graph: Graph, step: Step):
    x, value = step.whole(graph)
    low, high, inner = zip(*step.params["padding_config"], strict=True)
    if any(inner):
        raise ConfigError("format='onnx': padding between values has no rule; use format='jax'")
    pads = graph.constant([*low, *high], np.int64)
    return [graph.add("Pad", [x, pads, value], step.out_shapes[0], step.out_dtypes[0])]


def reduction(op: str) -> Rule:
    """The rule of a sum or a maximum over some dimensions."""

    def reduce(graph: Graph, step: Step):
        axes = graph.constant(step.params["axes"], np.int64)
        inputs = [*step.whole(graph), axes]
        return [graph.add(op, inputs, step.out_shapes[0], step.out_dtypes[0], keepdims=0)]

    return reduce


RULES["reduce_sum"] = reduction("ReduceSum")
RULES["reduce_max"] = reduction("ReduceMax")


@rule("sort")
def _sort(graph: Graph, step: Step):
    """TopK of all, the least first: like a stable sort it leaves equal values in their order.

    A NaN comes last, as in JAX, but counts as equal to infinity.
    """
    if step.params["num_keys"] != 1:
        raise ConfigError("format='onnx': a sort by two keys has no rule; use format='jax'")
    operands, axis, shape = step.whole(graph), step.params["dimension"], step.shapes[0]
    key = operands[0]
    if np.issubdtype(key.dtype, np.floating):
        is_nan = elementwise(graph, "IsNaN", [key], bool)
        infinity = graph.constant(np.inf, key.dtype)
        key = elementwise(graph, "Where", [is_nan, infinity, key], key.dtype)
    count = graph.constant([shape[axis]], np.int64)
    outputs = [(shape, key.dtype), (shape, np.int64)]
    order = graph.add_many("TopK", [key, count], outputs, axis=axis, largest=0, sorted=1)[1]
    return [graph.add("GatherElements", [x, order], shape, x.dtype, axis=axis) for x in operands]


@rule("slice")
def _slice(graph: Graph, step: Step):
    starts, limits = step.params["start_indices"], step.params["limit_indices"]
    strides = step.params["strides"] or [1] * len(starts)
    # What is taken whole is left out: the batch cannot be named.
    axes = [
        axis
        for axis, size in enumerate(step.shapes[0])
        if size != BATCH and (starts[axis], limits[axis], strides[axis]) != (0, size, 1)
    ]
    bounds = [[values[axis] for axis in axes] for values in (starts, limits, strides)]
    x = step.whole(graph)[0]
    return [cut(graph, x, step.out_shapes[0], axes, *bounds)]


def cut(
    graph: Graph,
    x: Tensor,
    shape: Shape,
    axes: Sequence[int],
    starts: Sequence[int],
    limits: Sequence[int],
    strides: Sequence[int],
) -> Tensor:
    """Part of a tensor, of the given shape."""
    bounds = [graph.constant(value, np.int64) for value in (starts, limits, axes, strides)]
    return graph.add("Slice", [x, *bounds], shape, x.dtype)


@rule("gather")
def _gather(graph: Graph, step: Step):
    """Its two uses: a part at a constant place, and rows of each example in an order of its own."""
    numbers, sizes = step.params["dimension_numbers"], step.params["slice_sizes"]
    x, index = step.whole(graph)
    axes = list(numbers.start_index_map)
    if step.inputs[1].array is not None and index.shape == (len(axes),):
        starts = step.inputs[1].array.tolist()
        limits = [start + sizes[axis] for start, axis in zip(starts, axes, strict=True)]
        part = tuple(sizes[i] if i in axes else size for i, size in enumerate(x.shape))
        made = cut(graph, x, part, axes, starts, limits, [1] * len(axes))
        return [graph.reshape(made, step.out_shapes[0])]
    if (numbers.operand_batching_dims, axes, numbers.collapsed_slice_dims) == ((0,), [1], (1,)):
        rows = graph.cast(index, np.int64)
        return [graph.add("GatherND", [x, rows], step.out_shapes[0], x.dtype, batch_dims=1)]
    raise ConfigError(f"format='onnx': a gather with {numbers} has no rule; use format='jax'")


@rule("dot_general")
def _dot_general(graph: Graph, step: Step):
    """A product of matrices: batch dimensions first, then rows and what is summed, or columns."""
    sides = list(zip(step.whole(graph), *step.params["dimension_numbers"], strict=True))
    free = [
        [i for i in range(len(x.shape)) if i not in (*summed, *batch)] for x, summed, batch in sides
    ]
    # Rows may be several dimensions, the batch of images among them; columns are made one.
    swap = any(sides[1][0].shape[i] == BATCH for i in free[1])
    if swap:
        sides.reverse()
        free.reverse()
    (left, left_summed, left_batch), (right, right_summed, right_batch) = sides
    rows, columns = free
    batches = tuple(left.shape[i] for i in left_batch)
    height = tuple(left.shape[i] for i in rows)
    outer = tuple(right.shape[i] for i in columns)
    inner, width = product(left.shape[i] for i in left_summed), product(outer)
    merged = (product(height),) if batches else height

    left = graph.transpose(left, [*left_batch, *rows, *left_summed])
    left = graph.reshape(left, (*batches, *merged, inner))
    right = graph.transpose(right, [*right_batch, *right_summed, *columns])
    right = graph.reshape(right, (*batches, inner, width))
    made = graph.add("MatMul", [left, right], (*batches, *merged, width), step.out_dtypes[0])
    made = graph.reshape(made, (*batches, *height, *outer))
    if not swap:
        return [made]
    first, second = len(batches), len(batches) + len(height)
    rest = (*range(second, len(made.shape)), *range(first, second))
    return [graph.transpose(made, [*range(first), *rest])]


def product(sizes: Iterable[Any]) -> int:
    """Number of values.

    Raises:
      ConfigError: if the batch is among the sizes.
    """
    sizes = tuple(sizes)
    if BATCH in sizes:
        raise ConfigError("format='onnx': the batch joined with others has no rule; use 'jax'")
    return math.prod(sizes)
