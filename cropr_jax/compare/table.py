"""The table of a comparison as Markdown and CSV."""

import csv
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from cropr_jax.bench.report import Row

COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda row: row["reduction"],
    "schedule": lambda row: row["schedule"].replace("_", "-"),
    "fusion": lambda row: row["fusion"],
    "R": lambda row: "" if row["rate"] is None else str(row["rate"]),
    "pruned %": lambda row: _percent(row.get("tpr")),
    "tokens": lambda row: str(row["tokens"][-1]) if row.get("tokens") else "",
    "mean %": lambda row: _percent(row.get("mean")),
    "95 % over seeds": lambda row: _interval(row),
    "median": lambda row: _percent(row.get("median")),
    "seeds": lambda row: ", ".join(_percent(value) for value in row.get("values", ())),
    "images/s": lambda row: _number(row.get("images_per_second"), ".4g"),
    "speed": lambda row: _number(row.get("ratio"), ".2f"),
    "GMAC": lambda row: _number(row.get("macs_all"), ".4g", 1e-9),
    "M params": lambda row: _number(row.get("params_slim"), ".1f", 1e-6),
    "in training": lambda row: _number(row.get("params"), ".1f", 1e-6),
}


def _number(value: float | int | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else f"{value * factor:{form}}"


def _percent(value: float | int | None) -> str:
    return _number(value, ".1f", 100.0)


def _interval(row: Row) -> str:
    if row.get("unreachable"):
        return f"unreachable: {row['unreachable']}"
    if row.get("low") is None:
        return ""
    return f"[{_percent(row['low'])}, {_percent(row['high'])}]"


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Mean, median and Student's 95 % interval of the mean over seeds (None for one seed)."""
    found: dict[str, Any] = {
        "values": list(values),
        "mean": float(np.mean(values)),
        "median": float(np.median(values)),
        "low": None,
        "high": None,
    }
    if len(values) > 1:
        half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
        found |= {"low": found["mean"] - float(half), "high": found["mean"] + float(half)}
    return found


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown."""
    columns = {
        name.replace("mean", metric_name(rows)): show
        for name, show in COLUMNS.items()
        if name != "fusion" or any(row["fusion"] for row in rows)
    }
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(show(row) for show in columns.values())} |" for row in rows]
    return "\n".join(lines)


def metric_name(rows: Sequence[Row]) -> str:
    """What the means are of; 'mean' if no row has any."""
    return next((row["metric_label"] for row in rows if "metric_label" in row), "mean")


def comma_separated(rows: Sequence[Row]) -> str:
    """The rows with all their figures, not rounded; one column for each seed's value."""
    flat = []
    for row in rows:
        cells = {name: value for name, value in row.items() if name not in ("values", "seeds")}
        cells["tokens"] = " ".join(map(str, row.get("tokens", ())))
        seeds = zip(row.get("seeds", ()), row.get("values", ()), strict=True)
        flat.append(cells | {f"seed_{seed}": value for seed, value in seeds})
    names = list(dict.fromkeys(name for cells in flat for name in cells))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()
