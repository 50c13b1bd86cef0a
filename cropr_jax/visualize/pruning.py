"""The pruning picture: for every image, the block after which each patch was pruned.

Letters: b images, h and w the patch grid.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import BoundaryNorm, ListedColormap, to_rgb
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch

from cropr_jax.visualize.save import save

# Pairs of image and map in one row, and the height of one in inches.
PAIRS = 4
INCHES = 1.7
# Of the room after a pair, in images, and of the colour bar, in inches.
GAP = 0.12
BAR = 0.55
KEPT = "#ff3b1f"
# How much of a pruned patch's colour is the map's; the rest is the image in grey.
TINT = 0.75


def block_colors(last: int) -> np.ndarray:
    """RGB [last, 3] in 0..1 of the blocks 1 to `last`: early ones dark, late ones bright."""
    return colormaps["viridis"](np.linspace(0.0, 1.0, last))[:, :3]


def tint(color: np.ndarray, grey: np.ndarray | float) -> np.ndarray:
    """A block's colour over a pixel in grey; black pixels too leave the colour to be told."""
    return TINT * color + (1 - TINT) * (0.3 + 0.7 * np.asarray(grey)[..., None])


def paint(
    image: UInt8[np.ndarray, "height width 3"], pruned_after: Int[np.ndarray, "h w"], last: int
) -> np.ndarray:
    """The image with pruned patches in the colour of their block, kept ones as they are.

    Args:
      image: RGB.
      pruned_after: block (from 1) after which each patch was pruned, 0 where it was kept.
      last: the last block of the colour scale.

    Returns:
      RGB [height, width, 3] in 0..1.

    Raises:
      ValueError: if the image is no multiple of the grid, or a block is out of range.
    """
    (height, width), (rows, columns) = image.shape[:2], pruned_after.shape
    if height % rows or width % columns:
        raise ValueError(
            f"an image of {height} x {width} pixels is no multiple of a {rows} x {columns} grid"
        )
    if pruned_after.min() < 0 or pruned_after.max() > last:
        raise ValueError(
            f"pruned_after lies in {pruned_after.min()}..{pruned_after.max()}, expected 0..{last}"
        )
    pixels = image / 255.0
    grey = pixels @ np.array([0.299, 0.587, 0.114])
    block = np.kron(pruned_after, np.ones((height // rows, width // columns), int))
    color = block_colors(last)[np.maximum(block, 1) - 1]
    return np.where((block > 0)[..., None], tint(color, grey), pixels)


def outline(kept: np.ndarray) -> list[np.ndarray]:
    """Line segments, in units of patches, around the regions where bool [h, w] `kept` is true."""
    padded = np.pad(kept, 1)
    rows, columns = np.nonzero(padded[1:, 1:-1] != padded[:-1, 1:-1])
    level = [np.array([(x, y), (x + 1, y)]) for y, x in zip(rows, columns, strict=True)]
    rows, columns = np.nonzero(padded[1:-1, 1:] != padded[1:-1, :-1])
    upright = [np.array([(x, y), (x, y + 1)]) for y, x in zip(rows, columns, strict=True)]
    return level + upright


def pruning_figure(
    images: UInt8[np.ndarray, "b height width 3"],
    pruned_after: Int[np.ndarray, "b h w"],
    depth: int,
    titles: Sequence[str],
    path: str | Path,
) -> None:
    """Writes a picture: each image, and beside it the map of when its patches were pruned.

    Kept patches show the image and are outlined; the colour of the others is the block.

    Args:
      images: RGB, as the model saw them before normalisation.
      pruned_after: block (from 1) after which each patch was pruned, 0 where it was kept.
      depth: blocks of the model.
      titles: of each image.
      path: `.png`, `.pdf` or `.svg`.

    Raises:
      ValueError: if the numbers of images, maps and titles differ, or see `paint`.
    """
    images, pruned_after = np.asarray(images), np.asarray(pruned_after)
    if not len(images) == len(pruned_after) == len(titles):
        raise ValueError(
            f"{len(images)} images, {len(pruned_after)} maps and {len(titles)} titles: "
            "expected one of each for every image"
        )
    last = max(int(pruned_after.max()), 1)
    if last > depth:
        raise ValueError(f"pruned_after reaches {last}, but the model has {depth} blocks")
    columns = min(PAIRS, len(images))
    rows = -(-len(images) // columns)
    side = INCHES * images.shape[2] / images.shape[1]
    row_height = INCHES + 0.1 + 0.14 * (1 + max(title.count("\n") for title in titles))
    figure = Figure(
        figsize=(columns * (2 + GAP) * side, rows * row_height + BAR),
        layout=ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0, hspace=0),
        dpi=150,
    )
    FigureCanvasAgg(figure)
    parts = figure.subfigures(2, 1, height_ratios=[rows * row_height, BAR], squeeze=False)
    picture, legend = parts[:, 0]
    axes = picture.subplots(rows, 3 * columns, squeeze=False, width_ratios=[1, 1, GAP] * columns)
    for axis in axes.flat:
        axis.axis("off")
    height, width = images.shape[1:3]
    for i, title in enumerate(titles):
        left, right = axes[i // columns, 3 * (i % columns) : 3 * (i % columns) + 2]
        extent = (0, width, height, 0)
        left.imshow(images[i], interpolation="nearest", extent=extent)
        left.set_title(title, fontsize=8, loc="left", pad=3)
        draw_map(right, images[i], pruned_after[i], last)
    legend_of_blocks(legend, last)
    save(figure, path)


def draw_map(
    axis: Axes,
    image: UInt8[np.ndarray, "height width 3"],
    pruned_after: Int[np.ndarray, "h w"],
    last: int,
) -> None:
    """Draws `paint` with the kept patches outlined, and how many they are as title."""
    height, width = image.shape[:2]
    painted = paint(image, pruned_after, last)
    axis.imshow(painted, interpolation="nearest", extent=(0, width, height, 0))
    scale = np.array([width, height]) / pruned_after.shape[::-1]
    edges = [line * scale for line in outline(pruned_after == 0)]
    axis.add_collection(LineCollection(edges, colors=KEPT, linewidths=1.2))
    axis.set_title(
        f"{(pruned_after == 0).sum()} of {pruned_after.size} kept",
        fontsize=8,
        loc="left",
        pad=3,
        color=to_rgb(KEPT),
    )


def legend_of_blocks(figure: SubFigure, last: int) -> None:
    """Colour bar of the blocks, and the mark of kept patches."""
    bar, mark = figure.subplots(1, 2, width_ratios=[3, 1])
    norm = BoundaryNorm(np.arange(0.5, last + 1), last)
    mappable = ScalarMappable(norm, ListedColormap(tint(block_colors(last), 0.5)))
    step = -(-last // 12)
    made = figure.colorbar(
        mappable, cax=bar, orientation="horizontal", ticks=range(1, last + 1, step)
    )
    made.minorticks_off()
    made.set_label("pruned after block", fontsize=8)
    made.ax.tick_params(labelsize=7, length=2)
    made.outline.set_visible(False)
    mark.axis("off")
    mark.legend(
        handles=[Patch(facecolor="none", edgecolor=KEPT, linewidth=1.2, label="kept")],
        loc="center",
        frameon=False,
        fontsize=8,
    )
