"""What a trained model pruned and what it saw: a picture and a prediction for any image.

    python -m cropr_jax.explain --workdir runs/digits cat.jpg dog.jpg

Everything shown is the pruned model's own: the classes it predicts are those it finds with the
patches that it kept.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cropr_jax import cli
from cropr_jax.errors import ConfigError
from cropr_jax.inference import Predictor, load, read
from cropr_jax.segment import SegmentationPredictor
from cropr_jax.visualize.pruning import pruning_figure
from cropr_jax.visualize.segmentation import segmentation_figure


def explain(
    predictor: Predictor,
    images: Sequence[Any],
    path: str | Path,
    labels: Sequence[Any] | None = None,
) -> list[list[tuple[str, float]]]:
    """Writes the picture of what a model pruned of some images, and what it saw in them.

    Args:
      predictor: of a pruned model; of segmentation, of any.
      images: files, Pillow images or uint8 arrays, of any sizes.
      path: of the picture, `.png`, `.pdf` or `.svg`.
      labels: of the images, if they are known: numbers or, of segmentation, maps uint8 [height,
        width] with 255 where nothing is known. Shown beside the prediction.

    Returns:
      For each image (name, share) of five classes at most, greatest first: the probabilities or, of
      segmentation, the shares of pixels.

    Raises:
      ConfigError: if an image cannot be read, or a classifier names no pruned patches (the unpruned
        model, methods that merge).
    """
    if isinstance(predictor, SegmentationPredictor):
        return explain_maps(predictor, images, path, labels)
    return explain_classes(predictor, images, path, labels)


def explain_classes(
    predictor: Predictor, images: Sequence[Any], path: str | Path, labels: Sequence[int] | None
) -> list[list[tuple[str, float]]]:
    """`explain` of classification."""
    pixels = predictor.prepare(images)
    logits, out = predictor.predict(pixels)
    if not out.get("pruned"):
        raise ConfigError(
            f"config.model.reduction.name: {predictor.model.reduction!r} prunes no patches, so "
            "there is nothing to show"
        )
    best = predictor.top(logits)
    titles = [f"{classes[0][0]} ({classes[0][1]:.0%})" for classes in best]
    if labels is not None:
        names = [predictor.name(label) for label in labels]
        titles = [f"{name}: found {title}" for name, title in zip(names, titles, strict=True)]
    pruning_figure(pixels, np.asarray(out["pruned_after"]), predictor.model.depth, titles, path)
    return best


def explain_maps(
    predictor: SegmentationPredictor,
    images: Sequence[Any],
    path: str | Path,
    labels: Sequence[np.ndarray] | None,
) -> list[list[tuple[str, float]]]:
    """`explain` of segmentation."""
    pixels = predictor.prepare(images)
    _, out = predictor.predict(pixels)
    maps = None
    if out.get("pruned"):
        mean, std = (np.asarray(predictor.settings()[name]) for name in ("mean", "std"))
        seen = np.clip(255 * (pixels * std + mean) + 0.5, 0, 255).astype(np.uint8)
        maps = seen, np.asarray(out["pruned_after"])
    found = predictor.segment(images)
    names = [predictor.name(label) for label in range(predictor.model.num_classes)]
    shown = [np.asarray(read(image)) for image in images]
    segmentation_figure(shown, found, labels, maps, predictor.model.depth, names, path)
    return [predictor.shares(labels) for labels in found]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Raises:
      ConfigError: on what the user has to mend.
    """
    parser = cli.parser("cropr_jax.explain", __doc__)
    parser.add_argument("--workdir", required=True, help="of a run, or one of its checkpoints")
    parser.add_argument("--output", default="explain.png", help="the picture")
    parser.add_argument("images", nargs="+", metavar="IMAGE")
    args = parser.parse_args(argv)
    best = explain(load(args.workdir), args.images, args.output)
    for image, classes in zip(args.images, best, strict=True):
        print(f"{image}: " + ", ".join(f"{name} {share:.1%}" for name, share in classes))
    print(f"written: {args.output}")


if __name__ == "__main__":
    cli.run(main)
