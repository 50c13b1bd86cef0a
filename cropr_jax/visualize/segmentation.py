"""The picture of a segmentation: image, truth, prediction, and when each patch was pruned."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int, Integer, UInt8
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from cropr_jax.visualize.pruning import BAR, INCHES, draw_map, legend_of_blocks
from cropr_jax.visualize.save import save

# How much of a pixel is its class's colour; the rest is the image.
OVERLAY = 0.65
# Classes named below the picture, those of most pixels; in rows of as many names.
NAMED = 24
NAMES_IN_ROW = 6
ROW_OF_NAMES = 0.18


def class_colors(count: int) -> np.ndarray:
    """RGB [count, 3] in 0..1: hues by the golden ratio, so that near labels differ."""
    hues = (np.arange(count) * 0.6180339887) % 1.0
    colors = colormaps["hsv"](hues)[:, :3]
    light = np.array([1.0, 0.55, 0.85, 0.4, 0.7])[np.arange(count) % 5]
    return colors * light[:, None]


def overlay(
    image: UInt8[np.ndarray, "height width 3"],
    labels: Integer[np.ndarray, "height width"],
    classes: int,
) -> np.ndarray:
    """The image under the colours of its classes; labels from `classes` on show the image as it is.

    Returns:
      RGB [height, width, 3] in 0..1.
    """
    pixels = image / 255.0
    known = labels < classes
    color = class_colors(classes)[np.where(known, labels, 0)]
    return np.where(known[..., None], OVERLAY * color + (1 - OVERLAY) * pixels, pixels)


def segmentation_figure(
    images: Sequence[np.ndarray],
    predictions: Sequence[np.ndarray],
    truths: Sequence[np.ndarray] | None,
    maps: tuple[UInt8[np.ndarray, "b height width 3"], Int[np.ndarray, "b h w"]] | None,
    depth: int,
    class_names: Sequence[str],
    path: str | Path,
) -> None:
    """Writes a picture, one row for each image.

    Args:
      images: uint8 [height, width, 3] each, RGB, of any sizes.
      predictions: labels [height, width] of each.
      truths: likewise, 255 where unknown; or None.
      maps: what the model saw, and the block (from 1) after which each patch was pruned, 0 where it
        was kept; None for models that prune nothing.
      depth: blocks of the model.
      class_names: by label.
      path: `.png`, `.pdf` or `.svg`.

    Raises:
      ValueError: if the numbers of images, predictions and truths differ.
    """
    counts = {len(images), len(predictions), len(images if truths is None else truths)}
    if len(counts) > 1:
        raise ValueError("expected one prediction and one truth for every image")
    last = 0 if maps is None else max(int(maps[1].max()), 1)
    if last > depth:
        raise ValueError(f"pruned_after reaches {last}, but the model has {depth} blocks")
    columns = 2 + (truths is not None) + (maps is not None)
    names = _most_common([*predictions, *(truths or ())], len(class_names))
    below = ROW_OF_NAMES * (1 + -(-len(names) // NAMES_IN_ROW)) + (BAR if last else 0.0)
    widest = max(image.shape[1] / image.shape[0] for image in images)
    row = INCHES + 0.3
    figure = Figure(
        figsize=(columns * widest * INCHES + 0.3, len(images) * row + below),
        layout=ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0, hspace=0),
        dpi=150,
    )
    FigureCanvasAgg(figure)
    heights = [len(images) * row, below - (BAR if last else 0.0), *([BAR] if last else [])]
    picture, colors, *rest = figure.subfigures(
        len(heights), 1, height_ratios=heights, squeeze=False
    )[:, 0]
    _draw_rows(picture, columns, images, predictions, truths, maps, len(class_names))
    _legend_of_classes(colors, names, class_names)
    for bar in rest:
        legend_of_blocks(bar, last)
    save(figure, path)


def _draw_rows(
    picture: SubFigure,
    columns: int,
    images: Sequence[np.ndarray],
    predictions: Sequence[np.ndarray],
    truths: Sequence[np.ndarray] | None,
    maps: tuple[np.ndarray, np.ndarray] | None,
    classes: int,
) -> None:
    """A row of each image: itself, truth, prediction, and when its patches were pruned."""
    axes = picture.subplots(len(images), columns, squeeze=False)
    for i, (image, prediction) in enumerate(zip(images, predictions, strict=True)):
        shown = [("", image / 255.0)]
        if truths is not None:
            shown.append(("truth", overlay(image, truths[i], classes)))
        shown.append((_score(prediction, truths, i), overlay(image, prediction, classes)))
        for axis, (title, pixels) in zip(axes[i], shown, strict=False):
            axis.imshow(pixels, interpolation="nearest")
            axis.set_title(title, fontsize=8, loc="left", pad=3)
        if maps is not None:
            draw_map(axes[i, -1], maps[0][i], maps[1][i], max(int(maps[1].max()), 1))
    for axis in axes.flat:
        axis.axis("off")


def _score(prediction: np.ndarray, truths: Sequence[np.ndarray] | None, i: int) -> str:
    """Title of a prediction: the share of the known pixels that it has right."""
    if truths is None or not (truths[i] != 255).any():
        return "prediction"
    known = truths[i] != 255
    return f"prediction, {(prediction == truths[i])[known].mean():.0%} of pixels right"


def _most_common(maps: Sequence[np.ndarray], classes: int) -> list[int]:
    """Labels that occur, most pixels first."""
    count = sum(np.bincount(labels.reshape(-1), minlength=256)[:classes] for labels in maps)
    order = np.argsort(-np.asarray(count), kind="stable")[:NAMED]
    return [int(label) for label in order if np.asarray(count)[label]]


def _legend_of_classes(figure: SubFigure, labels: Sequence[int], names: Sequence[str]) -> None:
    axis = figure.subplots(1, 1)
    axis.axis("off")
    colors = class_colors(len(names))
    legend = axis.legend(
        handles=[Patch(color=colors[label], label="class") for label in labels],
        loc="center",
        ncols=NAMES_IN_ROW,
        frameon=False,
        fontsize=7,
        handlelength=1.0,
        columnspacing=1.0,
    )
    # Given as labels, names that begin with "_" would be left out.
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(names[label])
