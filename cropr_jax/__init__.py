"""Token Cropr in JAX/Flax: faster Vision Transformers by task-relevant token pruning."""

from typing import TYPE_CHECKING, Any

from cropr_jax.host.version import __version__

if TYPE_CHECKING:
    from cropr_jax.runs.load import load

__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    """`cropr_jax.load`, imported when it is first used: `import cropr_jax` stays light."""
    if name == "load":
        from cropr_jax.runs.load import load

        return load
    raise AttributeError(f"module 'cropr_jax' has no attribute {name!r}")
