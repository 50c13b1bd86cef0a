"""The rule of products of matrices."""

import math
from collections.abc import Iterable
from typing import Any

from cropr_jax.errors import ConfigError
from cropr_jax.models.to_onnx.graph import BATCH, Graph
from cropr_jax.models.to_onnx.step import Rule, Step


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


RULES: dict[str, Rule] = {"dot_general": _dot_general}
