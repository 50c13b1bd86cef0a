"""Training and evaluation: one loop for all tasks."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cropr_jax.train.loop import evaluate, train

__all__ = ["evaluate", "train"]


def __getattr__(name: str) -> Any:
    """The loop, imported when it is used: reading a checkpoint needs no input pipeline."""
    if name in __all__:
        from cropr_jax.train import loop

        return getattr(loop, name)
    raise AttributeError(f"module 'cropr_jax.train' has no attribute {name!r}")
