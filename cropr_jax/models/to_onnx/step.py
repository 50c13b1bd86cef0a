"""What a rule reads: one equation of a jaxpr, with its inputs as they lie in the graph."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from cropr_jax.models.to_onnx.graph import Graph, Shape, Tensor


@dataclasses.dataclass(frozen=True)
class Step:
    """An equation.

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
