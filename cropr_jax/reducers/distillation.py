"""What the losses between a student and its frozen teacher share.

Letters: b batch, c classes or channels.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def divergence(student: Float[Array, "*b c"], teacher: Float[Array, "*b c"]) -> Float[Array, "*b"]:
    """KL(teacher || student) of the softmax of each row, in float32.

    Its mean over rows is what raoyongming/DynamicViT and Sense-X/SiT: losses.py compute at
    temperature 1 (`kl_div` with reduction 'batchmean').
    """
    theirs = jax.nn.log_softmax(teacher.astype(jnp.float32), axis=-1)
    ours = jax.nn.log_softmax(student.astype(jnp.float32), axis=-1)
    return (jnp.exp(theirs) * (theirs - ours)).sum(-1)


def squared_error(
    student: Float[Array, "*b c"], teacher: Float[Array, "*b c"]
) -> Float[Array, "*b"]:
    """Mean squared difference of each row, in float32."""
    return ((student.astype(jnp.float32) - teacher.astype(jnp.float32)) ** 2).mean(-1)
