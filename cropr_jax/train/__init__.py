"""Training and evaluation: one loop for all tasks."""

from cropr_jax.train.loop import evaluate, train

__all__ = ["evaluate", "train"]
