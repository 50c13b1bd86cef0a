"""Places at which the compiler for CPUs must finish a value before it goes on.

XLA's CPU compiler fuses a value into each of its uses, where it is computed again. The gradient of
the residual stream is a sum over all later blocks, which every block uses several times: the
backward pass would take time quadratic in the depth. And the update of every parameter uses the
learning rate, whose formula would be compiled hundreds of times. A barrier makes it write such a
value down.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float


def materialize(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """`x` itself, carried through two trips of a loop that leaves it alone.

    A loop is what XLA does not fuse across on CPU, where it drops `lax.optimization_barrier` before
    fusion; there are two trips, since loops of one are unrolled. The carried array stays where it
    is in memory, so that all it costs is the loop's counter. The barrier inside is for JAX, which
    may lift what does not change out of loops.
    """

    def more(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return carry[0] < 2

    def trip(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return carry[0] + 1, lax.optimization_barrier(carry[1])

    return lax.while_loop(more, trip, (jnp.zeros((), jnp.int32), x))[1]


def _on_cpu(x: Float[Array, "*b"], *, finish: bool) -> Float[Array, "*b"]:
    return materialize(x) if finish else x


def _elsewhere(x: Float[Array, "*b"], *, finish: bool) -> Float[Array, "*b"]:
    return x


# The identity, as an operation of its own: the platform is then that of the lowering, wherever it
# is done, and programs for all but CPU are the same to the letter as without it.
_barrier = Primitive("barrier")
_barrier.def_impl(_elsewhere)
_barrier.def_abstract_eval(lambda x, *, finish: x)
batching.defvectorized(_barrier)
ad.deflinear2(_barrier, lambda gradient, x, *, finish: [_barrier.bind(gradient, finish=True)])
mlir.register_lowering(_barrier, mlir.lower_fun(_elsewhere, multiple_results=False))
mlir.register_lowering(_barrier, mlir.lower_fun(_on_cpu, multiple_results=False), platform="cpu")


def gradient_barrier(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """`x`; its gradient is materialized on CPU (see above), and untouched elsewhere."""
    return _barrier.bind(x, finish=False)


def barrier(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """`x`, materialized on CPU (see above), and untouched elsewhere."""
    return _barrier.bind(x, finish=True)
