"""Token reduction methods, one file each; `registry.REDUCERS` names them."""

from cropr_jax.reducers.base import Context, Pruner, Reducer

__all__ = ["Context", "Pruner", "Reducer"]
