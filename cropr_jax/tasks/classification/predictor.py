"""The predictor of classification: the probable classes of an image.

    import cropr_jax
    predictor = cropr_jax.load("runs/digits")
    predictor.top(predictor(["cat.jpg"], preprocess=True))       # [[("cat", 0.93), ...]]

Letters: b images, c classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cropr_jax.core.reducer import Pruner
from cropr_jax.errors import ConfigError
from cropr_jax.models import Trunk
from cropr_jax.reducers import registry
from cropr_jax.tasks.predictor import Predictor, read


class ClassificationPredictor(Predictor):
    """Finds the class of images with a pruned model."""

    def top(self, logits: Any, k: int = 5) -> list[list[tuple[str, float]]]:
        """The k most probable classes of each image as (name, probability), best first."""
        probabilities = np.asarray(jax.nn.softmax(jnp.asarray(logits), axis=-1))
        best = np.argsort(-probabilities, axis=-1, kind="stable")[:, :k]
        return [
            [(self.name(int(label)), float(row[label])) for label in labels]
            for row, labels in zip(probabilities, best, strict=True)
        ]

    def prepare(self, images: Sequence[Any]) -> np.ndarray:
        """uint8 [b, height, width, 3] of the model's size, from files, Pillow images or arrays.

        Raises:
          ConfigError: without `preprocess` settings, or on a file that cannot be read.
        """
        from cropr_jax.data.preprocess import eval_image

        settings = self.settings()
        return np.stack([np.asarray(eval_image(read(image), settings)) for image in images])

    @classmethod
    def picture(cls, model: Trunk) -> str:
        """`pruning.png`, but where nothing is pruned, or merged."""
        removes = model.schedule.removed > 0
        prunes = removes and issubclass(registry.method(model.reduction), Pruner)
        return "pruning.png" if prunes else ""

    def explain(
        self, images: Sequence[Any], path: str | Path, truths: Sequence[int] | None = None
    ) -> list[list[tuple[str, float]]]:
        """`Predictor.explain`; the shares are the probabilities of the classes."""
        from cropr_jax.visualize.pruning import pruning_figure

        pixels = self.prepare(images)
        logits, out = self.predict(pixels)
        if not out.get("pruned"):
            raise ConfigError(
                f"config.model.reduction.name: {self.model.reduction!r} prunes no patches, so "
                "there is nothing to show"
            )
        best = self.top(logits)
        titles = [f"{classes[0][0]} ({classes[0][1]:.0%})" for classes in best]
        if truths is not None:
            names = [self.name(label) for label in truths]
            titles = [f"{name}: found {title}" for name, title in zip(names, titles, strict=True)]
        pruning_figure(pixels, np.asarray(out["pruned_after"]), self.model.depth, titles, path)
        return best
