"""From a function and its parameters to an ONNX file, over the function's jaxpr.

What depends on parameters alone is computed at once.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.extend import core
from jaxtyping import Array, Float
from onnx import helper

from cropr_jax.errors import ConfigError
from cropr_jax.models.to_onnx.graph import BATCH, Graph, Shape, Tensor
from cropr_jax.models.to_onnx.rules import RULES
from cropr_jax.models.to_onnx.step import Step

OPSET = 20  # the first with Gelu; TopK breaks ties by index
IR_VERSION = 9  # the first that has that opset
MAX_BYTES = 2**31 - 1  # of a protobuf message
# Calls whose body is written out in their place.
CALLS = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


def convert(
    function: Callable[[Sequence[Any], Any], jax.Array],
    params: Mapping[str, np.ndarray],
    images: jax.ShapeDtypeStruct,
    metadata: Mapping[str, Any],
) -> bytes:
    """The file of a model.

    Args:
      function: of the parameters' values and images; gives logits [b, c].
      params: by name.
      images: of a batch; its first dimension is symbolic and called `BATCH`.
      metadata: goes into the file as JSON, entry by entry.

    Returns:
      A serialized model with input `images` and output `logits`.

    Raises:
      ConfigError: if the model computes what has no rule, or is larger than such a file can be.
    """
    if sum(array.nbytes for array in params.values()) > MAX_BYTES:
        raise ConfigError("format='onnx': the parameters take more than 2 GiB; use format='jax'")
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in params.values()]
    with nn.intercept_methods(name_layer_norms):
        jaxpr = jax.make_jaxpr(function)(shapes, images)
    graph = Graph()
    source = graph.input("images", sizes_of(images), images.dtype)
    weights = [Tensor(name, a.shape, a.dtype, a) for name, a in params.items()]
    (result,) = write_out(graph, jaxpr, [*weights, source])
    result = graph.full(result, sizes_of(jaxpr.out_avals[0]))
    model = helper.make_model(
        graph.finish(source, result, "logits"),
        producer_name="cropr_jax",
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    helper.set_model_props(model, {name: json.dumps(value) for name, value in metadata.items()})
    return model.SerializeToString()


@jax.jit
def layer_norm(
    x: Float[Array, "*b d"],
    scale: Float[Array, "d"],
    bias: Float[Array, "d"],
    epsilon: Float[Array, ""],
) -> Float[Array, "*b d"]:
    """Layer norm of the last dimension, known to the graph by the name of this function.

    Written out it is eleven operators, each of which reads and writes all tokens.
    """
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + epsilon) * scale + bias


def name_layer_norms(call: Callable, args: Any, kwargs: Any, context: nn.module.InterceptorContext):
    """For `flax.linen.intercept_methods`: has every LayerNorm computed by `layer_norm`."""
    module = context.module
    if not isinstance(module, nn.LayerNorm) or context.method_name != "__call__":
        return call(*args, **kwargs)
    params = module.variables["params"]
    return layer_norm(*args, params["scale"], params["bias"], jnp.float32(module.epsilon))


def add_layer_norm(graph: Graph, x: Tensor, scale: Tensor, bias: Tensor, epsilon: Tensor) -> Tensor:
    """The node of `layer_norm`."""
    assert epsilon.array is not None
    return graph.add(
        "LayerNormalization",
        [x, scale, bias],
        x.shape,
        x.dtype,
        axis=-1,
        epsilon=float(epsilon.array),
    )


def sizes_of(aval: Any) -> Shape:
    """The shape by which the graph knows a value of the jaxpr.

    Raises:
      ConfigError: if a dimension is computed from the batch.
    """
    shape = []
    for size in aval.shape:
        if not isinstance(size, int) and str(size) != BATCH:
            raise ConfigError(f"format='onnx': a dimension of {size} has no rule; use format='jax'")
        shape.append(size if isinstance(size, int) else BATCH)
    return tuple(shape)


def write_out(graph: Graph, jaxpr: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Adds the nodes of a jaxpr.

    Args:
      graph: to add to.
      jaxpr: open or closed.
      inputs: of its inputs.

    Returns:
      Its outputs, broadcasts put off.
    """
    constants = [graph.constant(value) for value in getattr(jaxpr, "consts", ())]
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    known = dict(zip(jaxpr.constvars, constants, strict=True))
    known |= dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Tensor:
        if isinstance(atom, core.Literal):
            return graph.constant(atom.val, atom.aval.dtype)
        return known[atom]

    for equation in jaxpr.eqns:
        name = equation.primitive.name
        tensors = [read(atom) for atom in equation.invars]
        if equation.params.get("name") == layer_norm.__name__:
            outputs = [add_layer_norm(graph, *tensors)]
        elif name in CALLS:
            outputs = write_out(graph, equation.params[CALLS[name]], tensors)
        else:
            outputs = apply_rule(graph, equation, tensors)
        known |= dict(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def apply_rule(graph: Graph, equation: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Outputs of one equation; of constants they are computed at once."""
    name = equation.primitive.name
    avals = [var.aval for var in equation.outvars]
    missing = next((x.missing for x in inputs if x.missing), "" if name in RULES else name)
    if missing:
        return [Tensor("", (), np.dtype(bool), missing=missing) for _ in avals]
    out_shapes = [sizes_of(aval) for aval in avals]
    shapes = [sizes_of(atom.aval) for atom in equation.invars]
    arrays = [x.array for x in inputs if x.array is not None]
    constant = len(arrays) == len(inputs) > 0
    if constant and not any(BATCH in shape for shape in (*shapes, *out_shapes)):
        arrays = [np.broadcast_to(a, shape) for a, shape in zip(arrays, shapes, strict=True)]
        made = equation.primitive.bind(*arrays, **equation.params)
        made = made if equation.primitive.multiple_results else [made]
        return [graph.constant(value) for value in made]
    step = Step(inputs, shapes, out_shapes, [aval.dtype for aval in avals], equation.params)
    return RULES[name](graph, step)
