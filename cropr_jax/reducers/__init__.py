"""Token reduction methods, one file each; `registry.REDUCERS` names them."""

from cropr_jax.core.reducer import Context, Criterion, Pruner, Reducer

__all__ = ["Context", "Criterion", "Pruner", "Reducer"]
