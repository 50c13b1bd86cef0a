"""Accuracy against speed of several methods."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cropr_jax.visualize.save import save


def label(reduction: str, schedule: str, fusion: str) -> str:
    """What a row is called in pictures: 'cropr per-block llf'."""
    words = (reduction, schedule.replace("_", "-"), fusion)
    return " ".join(word for word in dict.fromkeys(words) if word)


def plot(rows: Sequence[Mapping[str, Any]], path: Path, metric: str) -> None:
    """Accuracy against images/s; a method's rates and schedules are joined by a line.

    The kind of picture that the paper's trade-off figure is.

    Args:
      rows: as `cropr_jax.compare` makes them; those with both figures are drawn.
      path: of the PNG.
      metric: name of the y axis.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # The usual ten colours and their light shades: there are more than ten methods.
    shades = colormaps["tab20"].colors
    axes.set_prop_cycle(color=shades[::2] + shades[1::2])
    lines: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("mean") is not None and row.get("images_per_second") is not None:
            names = (row["reduction"], row["schedule"], row["fusion"])
            lines.setdefault(names, []).append(row)
    for names, points in lines.items():
        points = sorted(points, key=lambda row: row["images_per_second"])
        y = np.array([100 * row["mean"] for row in points])
        spread = [
            [100 * (row["mean"] - min(row["values"])) for row in points],
            [100 * (max(row["values"]) - row["mean"]) for row in points],
        ]
        axes.errorbar(
            [row["images_per_second"] for row in points],
            y,
            yerr=spread,
            marker="o" if names[1] in ("", "per_block") else "s",
            capsize=2,
            label=label(*names),
        )
    axes.set_xlabel("images/s")
    axes.set_ylabel(f"{metric} (%); bars: lowest and highest seed")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save(figure, path, dpi=150)
