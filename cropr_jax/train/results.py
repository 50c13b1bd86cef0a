"""What a run leaves beside its checkpoints: JSON files, the table of results, a picture."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cropr_jax.data.preprocess import decode
from cropr_jax.data.sources import open_source
from cropr_jax.explain import explain
from cropr_jax.inference import predictor
from cropr_jax.models.segmenter import Segmenter
from cropr_jax.reducers import Pruner, registry
from cropr_jax.train.card import facts
from cropr_jax.train.logging import say, table
from cropr_jax.train.recipe import Recipe
from cropr_jax.train.run import Evaluation

PACKAGES = ("cropr_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
# Images in the picture that a run ends with.
PICTURED = 6


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide numbers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def revision() -> str:
    """Git revision of the source tree, with '+' if it has local changes; '' outside of one."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "HEAD")
    return head + ("+" if head and git("status", "--porcelain", "-uno") else "")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes beside and renames, so that a kill leaves the old file or the new one."""
    if jax.process_index() == 0:
        beside = path.with_name(path.name + ".tmp")
        beside.write_text(json.dumps(content, indent=2) + "\n")
        beside.replace(path)


def _percent(name: str, value: float | int | None) -> str:
    """A metric in words: fractions as per cent."""
    if value is None:
        return f"{name} -"
    return f"{name} {value:.6g}" if name in ("loss", "examples") else f"{name} {value:.2%}"


def _words(metrics: Mapping[str, float | int | None]) -> str:
    return ", ".join(_percent(name, value) for name, value in metrics.items())


def finish(path: Path, resolved: Recipe, found: Evaluation, **more: Any) -> dict[str, Any]:
    """Prints the result table, and that of the classes, and writes all to `path`."""
    result = {
        "metrics": found.metrics,
        **({"per_class": found.per_class} if found.per_class else {}),
        **more,
        **facts(resolved),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "config": resolved.config,
        "versions": versions(),
        "revision": revision(),
    }
    write_json(path, result)
    for split, classes in found.per_class.items():
        say(table([(name, _words(row)) for name, row in classes.items()], f"Classes of '{split}'"))
    rows = [(split, _words(values)) for split, values in found.metrics.items()]
    rows += [
        ("total pruning ratio", f"{result['tpr']:.1%}"),
        ("parameters", f"{result['params']:,} in training, {result['params_slim']:,} slim"),
        ("written", str(path)),
    ]
    say(table(rows, "Result"))
    return result


def draw(workdir: Path, resolved: Recipe, params: dict[str, Any]) -> None:
    """Writes `pruning.png`: a few test images, and the block after which each patch was pruned.

    Of segmentation it is `segmentation.png`, with truth and prediction, and drawn of every model;
    of classification it is left out where nothing is pruned, or merged. With several processes,
    where none holds all parameters, `python -m cropr_jax.explain` draws it from the checkpoint.
    """
    model = resolved.model
    prunes = model.schedule.removed > 0 and issubclass(registry.method(model.reduction), Pruner)
    dense = isinstance(model, Segmenter)
    if not (prunes or dense) or jax.process_count() > 1:
        return
    name, split = next(iter(resolved.config["data"]["eval"].items()))
    source = open_source(resolved.config["data"], split)
    # Spread over the split, which is often sorted by class.
    chosen = np.linspace(0, len(source) - 1, min(PICTURED, len(source))).astype(int)
    records = [source[i] for i in dict.fromkeys(chosen.tolist())]
    host = jax.device_get(params)
    made = predictor(model, host, resolved.config["preprocess"], resolved.class_names)
    images = [decode(record["image"]) for record in records]
    labels = [record["label"] for record in records]
    path = workdir / ("segmentation.png" if dense else "pruning.png")
    explain(made, images, path, labels)
    say(f"Drew {len(images)} images of '{name}' to {path}")
