"""Methods compared on the same images: paired intervals, and the table of results."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from cropr_jax.bench import report

RESAMPLES = 10_000
LAST_RANK = 9  # ranks are stored as digits, this one for all that come later
MARKS = ("<!-- begin results -->", "<!-- end results -->")


def interval(
    differences: Float[np.ndarray, "n"], resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile interval of the mean, by the bootstrap over images.

    Resampling images with replacement draws the number of times that each distinct difference
    occurs from a multinomial distribution; there are few of them, however many images.

    Args:
      differences: of each image, method minus unpruned.
      resamples: bootstrap samples.
      seed: of the draws.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, section 13.3.
    """
    values, counts = np.unique(differences, return_counts=True)
    total = len(differences)
    draws = np.random.default_rng(seed).multinomial(total, counts / total, size=resamples)
    low, high = np.quantile(draws @ values / total, (0.025, 0.975))
    return float(low), float(high)


def hits(row: report.Row, top: int) -> Float[np.ndarray, "n"]:
    """Whether each image's label is among the first `top`, averaged over seeds."""
    digits = np.array([list(map(int, text)) for text in row["ranks"]])
    return (digits < top).mean(0)


def percent(value: float, sign: str = "") -> str:
    """A fraction in per cent; never a negative zero."""
    return f"{round(100 * value, 1) + 0.0:{sign}.1f}"


def table(content: Mapping[str, Any]) -> str:
    """The results in Markdown: the unpruned model, then a table for each schedule and rate."""
    rows = content["rows"]
    base = rows[0]
    folders = ", ".join(
        f"`{f['name']}` ({f['images']} images, "
        + ("centre crop only)" if f["crop_ratio"] == "none" else f"crop ratio {f['crop_ratio']})")
        for f in content["data"]
    )
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    lines = [
        f"Weights `{content['weights']['name']}` (sha256 {content['weights']['sha256'][:16]}…); "
        f"images: {folders}; {content['device']}; {versions}.",
        "",
        f"Unpruned: top-1 {percent(base['top1'])} %, top-5 {percent(base['top5'])} %, "
        f"{base['macs_all'] / 1e9:.2f} GMAC (attention products counted).",
    ]
    for schedule, rate in dict.fromkeys((row["schedule"], row["rate"]) for row in rows[1:]):
        group = [row for row in rows[1:] if (row["schedule"], row["rate"]) == (schedule, rate)]
        lines += [
            "",
            f"### {schedule}, R = {rate}",
            "",
            "| method | fusion | removed | GMAC | top-1 % | difference (95 %) | top-5 % "
            "| difference (95 %) |",
            "|---|---|--:|--:|--:|--:|--:|--:|",
        ]
        notes = []
        for row in group:
            if "unreachable" in row:
                lines.append(f"| {row['reduction']} | {row['fusion']} | unreachable | | | | | |")
                notes += ["", f"{row['reduction']}: {row['unreachable']}."]
                continue
            cells = [row["reduction"], row["fusion"], str(row["removed"])]
            cells.append(f"{row['macs_all'] / 1e9:.2f}")
            for top in ("top1", "top5"):
                seeds = row[f"{top}_seeds"]
                spread = f" ({percent(min(seeds))} to {percent(max(seeds))})"
                low, high = (percent(bound, "+") for bound in row[f"{top}_interval"])
                cells.append(percent(row[top]) + (spread if len(seeds) > 1 else ""))
                cells.append(f"{percent(row[f'{top}_difference'], '+')} [{low}, {high}]")
            lines.append(f"| {' | '.join(cells)} |")
        lines += notes
    return "\n".join(lines)


def write_markdown(path: Path, text: str) -> None:
    """Writes the text; in a file that has our marks, only what is between them is replaced."""
    begin, end = MARKS
    block = f"{begin}\n{text}\n{end}"
    old = path.read_text() if path.exists() else ""
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(pattern.sub(lambda _: block, old) if pattern.search(old) else block + "\n")
