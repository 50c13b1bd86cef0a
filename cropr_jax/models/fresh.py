"""Fresh parameters, drawn array by array: the start of a model without compiling the model.

XLA takes half a minute to compile `model.init` of a ViT-L for a CPU, since it compiles the draw of
every parameter; yet blocks are alike. Here the trace of `model.init` is cut into what makes each
parameter of its random key. Of those that are the same but for the key one is compiled. Keys are
folded one by one, which is a program of one line. The numbers are those of `model.init`.
"""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxlib.version import __version_info__ as JAXLIB

from cropr_jax.models.trunk import Trunk


class Trace(NamedTuple):
    """What `model.init` does, as equations.

    Attributes:
      program: of a key, to all parameters in the order of the tree.
      shapes: the parameters as a tree of shapes.
    """

    program: core.ClosedJaxpr
    shapes: Any


def trace(model: Trunk) -> Trace:
    """Traces `model.init`, which takes seconds for a large model; once, however many ask."""
    hashable: Any = model  # flax modules are
    return _trace(hashable)


@functools.lru_cache(maxsize=64)
def _trace(model: Any) -> Trace:
    shapes, train = model.input_shapes(1), not model.slim

    def make(key: jax.Array) -> Any:
        inputs = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        keys = jax.random.split(jax.random.key(0), 1)
        return model.init(key, inputs, train=train, keys=keys)["params"]

    return Trace(*jax.make_jaxpr(make, return_shape=True)(jax.random.key(0)))


def draw(traced: Trace, key: jax.Array, wanted: Sequence[int]) -> list[jax.Array]:
    """Some of the parameters that a trace makes.

    Args:
      traced: of a model.
      key: random key [].
      wanted: places of the parameters in the order of the tree.
    """
    values = _Values(traced.program, key)
    plans = [values.plan(traced.program.jaxpr.outvars[place]) for place in wanted]
    recipes = {recipe for recipe, _ in plans}
    # Neither compiling nor drawing keeps one core busy, let alone all.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        compiled = dict(zip(recipes, threads.map(_compiled, recipes), strict=True))
        # Waited for in its thread: the device would else draw one after the other.
        return list(
            threads.map(lambda plan: jax.block_until_ready(compiled[plan[0]](*plan[1])), plans)
        )


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """How a parameter is made of a few inputs; equal to another if the equations are.

    Attributes:
      text: the equations, variables numbered.
      inputs, equations, output: variables to begin with, what is done, and its result.
    """

    text: str
    inputs: Sequence[core.Var] = dataclasses.field(compare=False)
    equations: Sequence[core.JaxprEqn] = dataclasses.field(compare=False)
    output: Any = dataclasses.field(compare=False)

    def __call__(self, *arguments: jax.Array) -> jax.Array:
        values = dict(zip(self.inputs, arguments, strict=True))
        for equation in self.equations:
            found = _bind(equation, [_read(x, values) for x in equation.invars])
            values |= dict(zip(equation.outvars, found, strict=True))
        return jnp.asarray(_read(self.output, values), self.output.aval.dtype)


def _read(var: Any, values: dict[core.Var, Any]) -> Any:
    return var.val if isinstance(var, core.Literal) else values[var]


def _bind(equation: core.JaxprEqn, arguments: Sequence[Any]) -> Sequence[Any]:
    found = equation.primitive.bind(*arguments, **equation.params)
    return found if equation.primitive.multiple_results else [found]


def _recipe(inputs: Sequence[core.Var], equations: Sequence[core.JaxprEqn], output: Any) -> _Recipe:
    numbers = {var: number for number, var in enumerate(inputs)}
    lines = [str([var.aval for var in inputs])]
    for equation in equations:
        used = [x.val if isinstance(x, core.Literal) else f"v{numbers[x]}" for x in equation.invars]
        numbers |= {var: len(numbers) + i for i, var in enumerate(equation.outvars)}
        made = [var.aval for var in equation.outvars]
        lines.append(f"{equation.primitive.name} {used} {equation.params} {made}")
    lines.append(str(output) if isinstance(output, core.Literal) else f"v{numbers[output]}")
    return _Recipe("\n".join(lines), inputs, equations, output)


class _Values:
    """Values of the variables of a program, as far as they are asked for."""

    def __init__(self, program: core.ClosedJaxpr, key: jax.Array):
        jaxpr = program.jaxpr
        self._known = dict(zip(jaxpr.constvars, program.consts, strict=True))
        self._known[jaxpr.invars[0]] = key
        # By variable: the equation that makes it, and the place of that.
        self._made_by = {
            var: (place, equation)
            for place, equation in enumerate(jaxpr.eqns)
            for var in equation.outvars
        }

    def of(self, var: Any) -> Any:
        """The value of a variable or a literal; keys are remembered, since many fold the same."""
        if isinstance(var, core.Literal):
            return var.val
        if var not in self._known and _is_key(var):
            _, equation = self._made_by[var]
            # Not compiled into one: what is folded in differs from parameter to parameter.
            found = _bind(equation, [self.of(x) for x in equation.invars])
            self._known |= dict(zip(equation.outvars, found, strict=True))
        if var not in self._known:
            recipe, arguments = self.plan(var)
            self._known[var] = _compiled(recipe)(*arguments)
        return self._known[var]

    def plan(self, var: Any) -> tuple[_Recipe, list[Any]]:
        """How a variable is made, and of which values."""
        inputs, equations = self._slice(var)
        return _recipe(inputs, equations, var), [self.of(x) for x in inputs]

    def _slice(self, var: Any) -> tuple[list[core.Var], list[core.JaxprEqn]]:
        """What a variable is made of: keys and constants, and the equations from there on."""
        inputs: dict[core.Var, None] = {}
        needed: dict[int, core.JaxprEqn] = {}
        waiting = [] if isinstance(var, core.Literal) else [var]
        while waiting:
            one = waiting.pop()
            if one in self._known or _is_key(one):
                inputs[one] = None
                continue
            place, equation = self._made_by[one]
            if place not in needed:
                needed[place] = equation
                waiting += [x for x in equation.invars if isinstance(x, core.Var)]
        return list(inputs), [needed[place] for place in sorted(needed)]


def _is_key(var: core.Var) -> bool:
    return jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key)


@functools.lru_cache(maxsize=256)
def _compiled(recipe: _Recipe) -> Any:
    """The program of a recipe."""
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in recipe.inputs]
    return jax.jit(recipe).lower(*shapes).compile(compiler_options=_options())


@functools.cache
def _options() -> dict[str, Any]:
    """Options of XLA with which draws are as fast and compiled in less than half of the time.

    Versions from 0.11 on no longer know the second one.
    """
    options: dict[str, Any] = {"xla_backend_optimization_level": 1}
    more = options | {"xla_cpu_use_fusion_emitters": False}
    return more if JAXLIB < (0, 11) else options
