"""Sinkhorn: patches are transported to learned centres."""

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from cropr_jax.reducers.soft import SoftReducer


def transport(similarity: Float[Array, "b k m"], iterations: int) -> Float[Array, "b k m"]:
    """Entropic transport plan between k centres and m tokens, by Sinkhorn's algorithm in logs.

    Rows and columns are made to sum to one in turn, columns last. So the weights of each token sum
    to 1 exactly, and those of each centre to m / k as the iterations converge: m times the plan
    between two uniform distributions (Cuturi, "Sinkhorn Distances", 2013).

    Args:
      similarity: minus the cost over epsilon, float32.
      iterations: at least 1.
    """
    token = jnp.zeros_like(similarity[:, :1])
    centre = jnp.zeros_like(similarity[:, :, :1])
    for _ in range(iterations):
        centre = -jax.nn.logsumexp(similarity + token, axis=2, keepdims=True)
        token = -jax.nn.logsumexp(similarity + centre, axis=1, keepdims=True)
    return jnp.exp(similarity + centre + token)


def unit(x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    """Rows of length one in float32; a row of zeros stays zero, with a finite gradient."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-12)


class Sinkhorn(SoftReducer):
    """Mixes tokens with the plan that transports them to K learned unit vectors, the centres.

    Haurum et al., "Multi-scale hybrid vision transformer and Sinkhorn tokenizer for sewer defect
    classification", Automation in Construction 2022, as reducer in "Which Tokens to Use?", ICCV
    2023 (JoakimHaurum/TokenReduction: models/sinkhorn.py). There the stored centres are overwritten
    with unit vectors at each call; here they are normalised on the fly, which computes the same.

    Attributes:
      epsilon: entropy; large mixes all tokens alike, small assigns each to one centre.
      iterations: of Sinkhorn's algorithm; the gradient goes through all of them.
      unit_values: mix tokens of length one, as the reference does, which loses their magnitude.
        False mixes the tokens as they are.
      averages: rescale each output's weights to sum to 1. In the reference they sum to about m / k.
    """

    epsilon: float = 1.0
    iterations: int = 3
    unit_values: bool = True
    averages: bool = False

    count_axes: ClassVar[Mapping[str, int]] = {"centres": 0}

    @property
    def needs(self) -> frozenset[str]:
        if self.epsilon <= 0 or self.iterations < 1:
            raise ValueError(
                f"sinkhorn: found epsilon {self.epsilon} and {self.iterations} iterations, "
                "expected epsilon > 0 and at least 1"
            )
        return frozenset()

    @nn.compact
    def mix(
        self, x: Float[Array, "b m d"], keep: int
    ) -> tuple[Float[Array, "b k m"], Float[Array, "b m d"]]:
        centres = self.param("centres", nn.initializers.normal(1.0), (keep, x.shape[-1]))
        units = unit(x)
        similarity = jnp.einsum("kd,bmd->bkm", unit(centres), units) / self.epsilon
        plan = transport(similarity, self.iterations)
        if self.averages:
            plan /= plan.sum(-1, keepdims=True)
        return plan, units.astype(x.dtype) if self.unit_values else x
