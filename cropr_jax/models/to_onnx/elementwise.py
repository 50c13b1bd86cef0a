"""Rules of what is computed element by element, with inputs that broadcast."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from cropr_jax.errors import ConfigError
from cropr_jax.models.to_onnx.graph import Graph, Shape, Tensor
from cropr_jax.models.to_onnx.step import Rule, Step

# Primitives that are one operator.
OPERATORS = {
    "abs": "Abs",
    "add": "Add",
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
    "pow": "Pow",
    "sign": "Sign",
    "sin": "Sin",
    "sqrt": "Sqrt",
    "sub": "Sub",
    "tanh": "Tanh",
}
# Of truth values; of integers these primitives are bitwise.
LOGICAL = {"and": "And", "not": "Not", "or": "Or"}


def common(tensors: Sequence[Tensor]) -> Shape:
    """The shape to which tensors of one rank (or scalars) are broadcast."""
    ranked = [tensor.shape for tensor in tensors if tensor.shape]
    return tuple(
        next((size for size in sizes if size != 1), 1) for sizes in zip(*ranked, strict=True)
    )


def elementwise(graph: Graph, op: str, inputs: Sequence[Tensor], dtype: Any, **attributes: Any):
    """A node that broadcasts its inputs."""
    return graph.add(op, inputs, common(inputs), dtype, **attributes)


def without_nan(graph: Graph, x: Tensor, number: float) -> Tensor:
    """The tensor with a number in place of each NaN; integers have none."""
    if not np.issubdtype(x.dtype, np.floating):
        return x
    is_nan = elementwise(graph, "IsNaN", [x], bool)
    return elementwise(graph, "Where", [is_nan, graph.constant(number, x.dtype), x], x.dtype)


def _operator(op: str, graph: Graph, step: Step):
    return [elementwise(graph, op, step.inputs, step.out_dtypes[0])]


def check_logical(step: Step) -> None:
    """Refuses bitwise arithmetic.

    Raises:
      ConfigError: unless the output is of truth values.
    """
    if step.out_dtypes[0] != np.bool_:
        raise ConfigError("format='onnx': bitwise arithmetic has no rule; use format='jax'")


def _logical(op: str, graph: Graph, step: Step):
    check_logical(step)
    return _operator(op, graph, step)


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


def _mul(graph: Graph, step: Step):
    """A product; x / 2 times 1 + erf(x / sqrt 2) becomes Gelu."""
    half, gate = step.inputs
    x = graph.partner(half, "Mul", 0.5)
    erf = graph.origin(graph.partner(gate, "Add", 1.0), "Erf")
    if x and erf and graph.partner(erf[0], "Mul", 2**-0.5) is x:
        return [elementwise(graph, "Gelu", [x], step.out_dtypes[0])]
    return [elementwise(graph, "Mul", step.inputs, step.out_dtypes[0])]


def _ne(graph: Graph, step: Step):
    equal = elementwise(graph, "Equal", step.inputs, bool)
    return [elementwise(graph, "Not", [equal], bool)]


def _is_finite(graph: Graph, step: Step):
    """Whether less than infinity in size, which a NaN is not."""
    (x,) = step.inputs
    size = elementwise(graph, "Abs", [x], x.dtype)
    return [elementwise(graph, "Less", [size, graph.constant(np.inf, x.dtype)], bool)]


def _rem(graph: Graph, step: Step):
    return [elementwise(graph, "Mod", step.inputs, step.out_dtypes[0], fmod=1)]


def _rsqrt(graph: Graph, step: Step):
    root = elementwise(graph, "Sqrt", step.inputs, step.out_dtypes[0])
    return [elementwise(graph, "Reciprocal", [root], step.out_dtypes[0])]


def _square(graph: Graph, step: Step):
    return [elementwise(graph, "Mul", step.inputs * 2, step.out_dtypes[0])]


def _integer_pow(graph: Graph, step: Step):
    exponent = graph.constant(step.params["y"], step.out_dtypes[0])
    return [elementwise(graph, "Pow", [*step.inputs, exponent], step.out_dtypes[0])]


def _log1p(graph: Graph, step: Step):
    """log u * x / (u - 1) with u = 1 + x as it is rounded, or x where that is 1 (HP-15C manual).

    The plain logarithm of u would lose small x.
    """
    (x,), one = step.inputs, graph.constant(1, step.out_dtypes[0])
    make = functools.partial(elementwise, graph, dtype=step.out_dtypes[0])
    u = make("Add", [x, one])
    lost = elementwise(graph, "Equal", [u, one], bool)
    ratio = make("Div", [x, make("Sub", [u, one])])
    return [make("Where", [lost, x, make("Mul", [make("Log", [u]), ratio])])]


def _select_n(graph: Graph, step: Step):
    which, on_false, on_true = step.inputs
    return [elementwise(graph, "Where", [which, on_true, on_false], step.out_dtypes[0])]


def _convert(graph: Graph, step: Step):
    return [graph.cast(step.inputs[0], step.out_dtypes[0])]


def _stop_gradient(graph: Graph, step: Step):
    return step.inputs


RULES: dict[str, Rule] = {
    **{name: functools.partial(_operator, op) for name, op in OPERATORS.items()},
    **{name: functools.partial(_logical, op) for name, op in LOGICAL.items()},
    "convert_element_type": _convert,
    "div": _div,
    "integer_pow": _integer_pow,
    "is_finite": _is_finite,
    "log1p": _log1p,
    "mul": _mul,
    "ne": _ne,
    "rem": _rem,
    "rsqrt": _rsqrt,
    "select_n": _select_n,
    "square": _square,
    "stop_gradient": _stop_gradient,
}
