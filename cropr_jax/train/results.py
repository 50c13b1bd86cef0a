"""What a run leaves beside its checkpoints: JSON files, the table of results, a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from cropr_jax.data.preprocess import decode
from cropr_jax.host.files import write_json
from cropr_jax.host.version import revision, versions
from cropr_jax.train.card import facts
from cropr_jax.train.logging import say, table
from cropr_jax.train.recipe import Recipe
from cropr_jax.train.run import Evaluation

# Images in the picture that a run ends with.
PICTURED = 6


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
    if jax.process_index() == 0:
        write_json(path, result)
    words = resolved.task.words
    for split, classes in found.per_class.items():
        say(table([(name, words(row)) for name, row in classes.items()], f"Classes of '{split}'"))
    rows = [(split, words(values)) for split, values in found.metrics.items()]
    rows += [
        ("total pruning ratio", f"{result['tpr']:.1%}"),
        ("parameters", f"{result['params']:,} in training, {result['params_slim']:,} slim"),
        ("written", str(path)),
    ]
    say(table(rows, "Result"))
    return result


def draw(workdir: Path, resolved: Recipe, params: dict[str, Any]) -> None:
    """Writes the task's picture of a few images of the first evaluation split, if it has one.

    With several processes, where none holds all parameters, `python -m cropr_jax.explain` draws it
    from the checkpoint. A picture is not worth a run: what goes wrong with it is a warning.
    """
    try:
        _draw(workdir, resolved, params)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        say(f"warning: the picture of the run was not drawn ({type(error).__name__}: {reason})")


def _draw(workdir: Path, resolved: Recipe, params: dict[str, Any]) -> None:
    kind = resolved.task.predictor
    name = kind.picture(resolved.model)
    if not name or jax.process_count() > 1:
        return
    split = next(iter(resolved.config["data"]["eval"]))
    source = resolved.splits.eval(split)
    # Spread over the split, which is often sorted by class.
    chosen = np.linspace(0, len(source) - 1, min(PICTURED, len(source))).astype(int)
    records = [source[i] for i in dict.fromkeys(chosen.tolist())]
    made = kind.from_model(
        resolved.model,
        jax.device_get(params),
        resolved.config["preprocess"],
        resolved.class_names,
    )
    images = [decode(record["image"]) for record in records]
    made.explain(images, workdir / name, [record["label"] for record in records])
    say(f"Drew {len(images)} images of '{split}' to {workdir / name}")
