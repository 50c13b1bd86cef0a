"""The benchmark's file and table."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from cropr_jax.errors import ConfigError
from cropr_jax.host.files import write_json
from cropr_jax.host.version import versions

Row = dict[str, Any]
PACKAGES = ("jax", "jaxlib", "flax", "optax", "einops", "numpy")
# What tells rows apart.
IDENTITY = ("config", "reduction", "precision", "attention", "stage")
COLUMNS = {
    "reduction": lambda row: row["reduction"],
    "stage": lambda row: row["stage"],
    # Rows of older files do not say.
    "fusion": lambda row: row.get("fusion", ""),
    "images/s": lambda row: f"{row['images_per_second']:.4g}",
    "spread": lambda row: f"{row['spread']:.2g}",
    "ratio": lambda row: "" if row["ratio"] is None else f"{row['ratio']:.3f}",
    "batch": lambda row: f"{row['batch_size']}",
    "latency ms": lambda row: (
        "" if row["latency_seconds"] is None else f"{1000 * row['latency_seconds']:.4g}"
    ),
    "GMAC linear": lambda row: f"{row['macs_linear'] / 1e9:.4g}",
    "GMAC all": lambda row: f"{row['macs_all'] / 1e9:.4g}",
    "GFLOP XLA": lambda row: f"{row['flops'] / 1e9:.4g}" if row.get("flops") else "",
    "M params slim": lambda row: f"{row['params_slim'] / 1e6:.1f}",
    "full": lambda row: f"{row['params_full'] / 1e6:.1f}",
    "tokens": lambda row: f"{row['tokens'][-1] if row['tokens'] else 'all'}",
    "trace s": lambda row: f"{row['trace_seconds']:.1f}",
    "trace + compile s": lambda row: f"{row['compile_seconds']:.1f}",
    "peak MiB": lambda row: f"{row['peak_bytes'] / 2**20:.0f}",
}


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, ["-" * width for width in widths], *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def table(rows: Sequence[Row], refused: Mapping[str, str]) -> str:
    """Rows of one group as text.

    Args:
      rows: of the methods that were timed.
      refused: why others were not, by name.
    """
    cells = [[show(row) for show in COLUMNS.values()] for row in rows]
    reasons = [f"{name}: not timed, {reason}" for name, reason in refused.items()]
    return "\n".join([format_table(list(COLUMNS), cells), *reasons])


def environment() -> dict[str, Any]:
    """Device, packages and switches that the numbers depend on."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "versions": versions(PACKAGES),
        "matmul_precision": jax.config.jax_default_matmul_precision,
    }


class Report:
    """A JSON file that is whole at any moment: `{"rows": [...], "device", "versions", ...}`.

    Attributes:
      content: what the file holds.
    """

    def __init__(self, path: str | Path | None):
        """Takes up a file that is there, so that an interrupted benchmark goes on.

        Args:
          path: of the file; None keeps the rows in memory.

        Raises:
          ConfigError: if the file is none of ours, or of another device or version.
        """
        self.path = Path(path) if path else None
        self.content: dict[str, Any] = {"rows": [], **environment()}
        if not self.path or not self.path.exists() or not self.path.stat().st_size:
            return
        try:
            before = json.loads(self.path.read_text())
            rows = before["rows"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--json: '{path}' is no benchmark file: give another") from error
        for name, value in environment().items():
            if before.get(name) != value:
                raise ConfigError(
                    f"--json: '{path}' was measured with {name} {before.get(name)!r}, now it is "
                    f"{value!r}: give another file"
                )
        self.content = before | {"rows": rows}

    def find(self, **identity: Any) -> Row | None:
        """The row of that identity."""
        for row in self.content["rows"]:
            if all(row[name] == identity[name] for name in IDENTITY):
                return row
        return None

    def add(self, rows: Sequence[Row]) -> None:
        """Adds rows, in place of earlier ones of the same identity, and writes the file."""
        new = [[row[name] for name in IDENTITY] for row in rows]
        kept = [r for r in self.content["rows"] if [r[name] for name in IDENTITY] not in new]
        self.put(rows=[*kept, *rows])

    def put(self, **fields: Any) -> None:
        """Sets fields of the file and writes it: beside, then renamed."""
        self.content |= fields
        if self.path:
            write_json(self.path, self.content, indent=1)
