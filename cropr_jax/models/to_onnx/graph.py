"""An ONNX graph while it is put together.

Broadcasts are put off: ONNX broadcasts by itself, and a bias that was expanded to the whole batch
would cost as much as the product before it. One dimension may be symbolic, the batch.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from cropr_jax.errors import ConfigError

BATCH = "batch"  # the symbolic dimension

Shape = tuple[Any, ...]  # of numbers and BATCH


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A value in the graph.

    Attributes:
      name: in the graph.
      shape: as it lies there: 1 where a broadcast was put off, `BATCH` for the symbolic dimension.
      dtype: NumPy's.
      array: its numbers if it is constant.
      missing: the primitive that would have made it and has no rule, else ''.
    """

    name: str
    shape: Shape
    dtype: np.dtype
    array: np.ndarray | None = None
    missing: str = ""


class Graph:
    """Nodes and constants while they are collected."""

    def __init__(self):
        self.nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, np.ndarray] = {}
        self._origins: dict[str, tuple[str, Sequence[Tensor]]] = {}
        self._count = itertools.count()

    def constant(self, array: Any, dtype: Any = None) -> Tensor:
        """A constant; it enters the graph when it is first used."""
        array = np.asarray(array, dtype)
        return Tensor(f"constant_{next(self._count)}", array.shape, array.dtype, array)

    def add(
        self, op: str, inputs: Sequence[Tensor], shape: Shape, dtype: Any, **attributes: Any
    ) -> Tensor:
        """A node of one output."""
        return self.add_many(op, inputs, [(shape, dtype)], **attributes)[0]

    def add_many(
        self,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[tuple[Shape, Any]],
        **attributes: Any,
    ) -> list[Tensor]:
        """A node; outputs are given as (shape, dtype).

        Raises:
          ConfigError: if an input comes from a primitive without a rule.
        """
        for tensor in inputs:
            if tensor.missing:
                raise ConfigError(
                    f"format='onnx': the model computes with {tensor.missing!r}, for which there "
                    "is no rule (random draws and loops have none); use format='jax'"
                )
            if tensor.array is not None:
                self._constants[tensor.name] = tensor.array
        made = [
            Tensor(f"{op}_{next(self._count)}", shape, np.dtype(dtype)) for shape, dtype in outputs
        ]
        self._origins |= {tensor.name: (op, inputs) for tensor in made}
        names = [tensor.name for tensor in inputs], [tensor.name for tensor in made]
        self.nodes.append(helper.make_node(op, *names, **attributes))
        return made

    def origin(self, x: Tensor | None, op: str) -> Sequence[Tensor]:
        """What a tensor was made of; nothing unless by that operator."""
        made_by, inputs = self._origins.get(x.name, ("", ())) if x else ("", ())
        return inputs if made_by == op else ()

    def partner(self, x: Tensor | None, op: str, number: float) -> Tensor | None:
        """What an operator of two inputs joined with that constant to make the tensor, or None."""
        inputs = self.origin(x, op)
        for one, other in zip(inputs, inputs[::-1], strict=True):
            if one.array is not None and one.array.size == 1 and np.isclose(one.array, number):
                return other
        return None

    def full(self, x: Tensor, shape: Shape) -> Tensor:
        """The tensor with all broadcasts carried out that were put off."""
        if x.shape == shape:
            return x
        if BATCH not in shape:
            target = self.constant(shape, np.int64)
        else:
            parts = [self.batch if d == BATCH else self.constant([d], np.int64) for d in shape]
            target = self.add("Concat", parts, (len(shape),), np.int64, axis=0)
        return self.add("Expand", [x, target], shape, x.dtype)

    def reshape(self, x: Tensor, shape: Shape) -> Tensor:
        """Another shape of the same number of values."""
        if x.shape == shape:
            return x
        if x.array is not None:
            return self.constant(x.array.reshape(shape))
        sizes = self.constant([-1 if d == BATCH else d for d in shape], np.int64)
        return self.add("Reshape", [x, sizes], shape, x.dtype)

    def transpose(self, x: Tensor, order: Sequence[int]) -> Tensor:
        """Another order of the dimensions."""
        order = list(order)
        if order == sorted(order):
            return x
        shape = tuple(x.shape[i] for i in order)
        if x.array is not None:
            return self.constant(np.ascontiguousarray(x.array.transpose(order)))
        return self.add("Transpose", [x], shape, x.dtype, perm=order)

    def cast(self, x: Tensor, dtype: Any) -> Tensor:
        """Another type."""
        to = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return x if x.dtype == dtype else self.add("Cast", [x], x.shape, dtype, to=to)

    def input(self, name: str, shape: Shape, dtype: Any) -> Tensor:
        """The input of the graph; its first dimension is the batch."""
        made = Tensor(name, shape, np.dtype(dtype))
        self.batch = self.add("Shape", [made], (1,), np.int64, start=0, end=1)
        return made

    def finish(self, source: Tensor, result: Tensor, name: str) -> onnx.GraphProto:
        """The graph from an input to an output of the given name, without idle nodes."""
        result_node = helper.make_node("Identity", [result.name], [name])
        used, nodes = {result.name}, [result_node]
        for node in reversed(self.nodes):
            if used.intersection(node.output):
                used.update(node.input)
                nodes.append(node)
        described = (
            helper.make_tensor_value_info(
                label, helper.np_dtype_to_tensor_dtype(tensor.dtype), tensor.shape
            )
            for label, tensor in ((source.name, source), (name, result))
        )
        start, end = described
        constants = [
            numpy_helper.from_array(np.ascontiguousarray(array), label)
            for label, array in self._constants.items()
            if label in used
        ]
        return helper.make_graph(nodes[::-1], "cropr_jax", [start], [end], constants)
