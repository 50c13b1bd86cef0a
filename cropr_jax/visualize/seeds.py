"""Spread over seeds of several methods."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cropr_jax.visualize.save import save
from cropr_jax.visualize.tradeoff import label


def plot(rows: Sequence[Mapping[str, Any]], path: Path, metric: str) -> None:
    """One box for each method over its seeds, with the seeds as points; the line is the median.

    The kind of picture that the paper's figure on ADE20k is.

    Args:
      rows: as `cropr_jax.compare` makes them; those with values are drawn.
      path: of the PNG.
      metric: name of the axis.
    """
    drawn = [row for row in rows if row.get("values")]
    values = [[100 * value for value in row["values"]] for row in drawn]
    names = [
        f"{label(row['reduction'], row['schedule'], row['fusion'])}"
        + (f" R={row['rate']}" if row["rate"] is not None else "")
        for row in drawn
    ]
    figure = Figure(figsize=(7, 0.8 + 0.35 * len(drawn)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.boxplot(values, orientation="horizontal", tick_labels=names)
    for place, points in enumerate(values, 1):
        axes.plot(points, [place] * len(points), "o", markersize=3, alpha=0.6)
    axes.invert_yaxis()
    axes.set_xlabel(f"{metric} (%) of each seed")
    axes.grid(axis="x", alpha=0.3)
    save(figure, path, dpi=150)
