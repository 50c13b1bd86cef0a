"""Token Cropr in JAX/Flax: faster Vision Transformers by task-relevant token pruning."""

from cropr_jax.version import __version__

__all__ = ["__version__"]
