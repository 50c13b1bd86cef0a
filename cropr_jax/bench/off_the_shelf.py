"""What token reduction costs without any training, on a pretrained ViT with a CLS token.

    python -m cropr_jax.bench.off_the_shelf --weights vit_tiny.npz --data imagenet_a:none \
        --data imagenet_b --rates 4,8,12,three_stage:29 --fusion llf,none \
        --json off_the_shelf.json --markdown off_the_shelf.md

Every method sees the same images, so differences to the unpruned model are paired: their intervals
come from a bootstrap over images and are far narrower than those of the accuracies. With `--json`
a second start of the same command goes on where the first was cut. Reading images needs Pillow.
"""

import argparse
import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cropr_jax import models
from cropr_jax.bench import paired, report, untrained
from cropr_jax.bench.ranking import Images, ranks, read_images
from cropr_jax.bench.untrained import Variant
from cropr_jax.convert import architecture
from cropr_jax.convert.load import load
from cropr_jax.convert.timm import check_match
from cropr_jax.core import trees
from cropr_jax.core.fusion import POOLED_FUSIONS
from cropr_jax.errors import ConfigError
from cropr_jax.host import cli
from cropr_jax.models import Trunk, costs

CROP_RATIO = 0.9  # shorter side 248 at 224, as the AugReg checkpoints are tested


def make_row(variant: Variant, model: Trunk, found: Sequence[np.ndarray], base: Any) -> report.Row:
    """A row of the table.

    Args:
      variant: what was measured.
      model: the same as a model.
      found: ranks of all images, for each seed.
      base: row of the unpruned model, or None for that row itself.

    Returns:
      Accuracies and differences as fractions; `ranks` has one digit per image and seed.
    """
    facts = costs.facts(model)
    row = dataclasses.asdict(variant) | {
        "removed": model.schedule.removed,
        "sites": len(model.schedule.sites),
        "macs_linear": facts["macs_linear"],
        "macs_all": facts["macs_all"],
        "ranks": ["".join(map(str, np.minimum(each, paired.LAST_RANK))) for each in found],
    }
    for top in (1, 5):
        each = paired.hits(row, top)
        seeds = [float((ranks < top).mean()) for ranks in found]
        differences = each - (each if base is None else paired.hits(base, top))
        row |= {
            f"top{top}": float(each.mean()),
            f"top{top}_seeds": seeds,
            f"top{top}_difference": float(differences.mean()),
            f"top{top}_interval": paired.interval(differences),
        }
    return row


def unreachable_row(variant: Variant, reason: str) -> report.Row:
    """A row of the table for a schedule that a method cannot meet."""
    return dataclasses.asdict(variant) | {"unreachable": reason}


def variant_of(row: report.Row) -> Variant:
    """What a row was measured for."""
    return Variant(**{field.name: row[field.name] for field in dataclasses.fields(Variant)})


def folder(text: str) -> tuple[str, Any]:
    """'DIR:RATIO' -> (DIR, RATIO or 'none'); without a ratio `CROP_RATIO`."""
    path, _, ratio = text.rpartition(":")
    if ratio == "none" and path:
        return path, "none"
    try:
        return (path, float(ratio)) if path else (text, CROP_RATIO)
    except ValueError:
        return text, CROP_RATIO


def methods(text: str) -> tuple[str, ...]:
    """Words by comma; none for the unpruned model alone."""
    return cli.words(text) if text else ()


def rates(text: str) -> tuple[tuple[str, int], ...]:
    """'4,three_stage:29' -> (('per_block', 4), ('three_stage', 29))."""
    pairs = (part.rpartition(":") for part in text.split(","))
    return tuple((schedule or "per_block", int(rate)) for schedule, _, rate in pairs)


def triple(text: str) -> tuple[float, ...]:
    """'0.5' or '0.485,0.456,0.406' -> three numbers."""
    values = tuple(map(float, text.split(",")))
    return values * 3 if len(values) == 1 else values


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = cli.parser("cropr_jax.bench.off_the_shelf", __doc__)
    add = made.add_argument
    add("--weights", type=Path, required=True, help="of a CLS-pooled ViT, see cropr_jax.convert")
    add(
        "--data",
        type=folder,
        action="append",
        required=True,
        metavar="DIR[:RATIO]",
        help=f"folder with a labels.json; crop ratio ({CROP_RATIO}), or 'none' to crop only",
    )
    add(
        "--rates",
        type=rates,
        default="4,8,12",
        metavar="[SCHEDULE:]R,...",
        help="tokens removed at a site; per_block unless another schedule is named",
    )
    add(
        "--reductions",
        type=methods,
        help="by comma, '' for none; every method without parameters unless given",
    )
    add("--fusion", type=cli.words, default=POOLED_FUSIONS, help="by comma")
    add("--heads", type=int, default=0, help="attention heads, if no known variant")
    add("--res", type=architecture.size, metavar="H[xW]", help="image size, if not the weights'")
    add("--mean", type=triple, default=(0.5,) * 3, help="of values in 0..1")
    add("--std", type=triple, default=(0.5,) * 3)
    add("--seeds", type=int, default=3, help="for methods that draw at random")
    add("--batch_size", type=int, default=50)
    add("--json", help="file for the results")
    add("--markdown", type=Path, help="file for the tables")
    return made


def check(args: argparse.Namespace) -> None:
    """Refuses arguments that cannot be, before anything is read.

    Raises:
      ConfigError: naming the argument.
    """
    for name in ("seeds", "batch_size"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name}: found {getattr(args, name)}, expected at least 1")
    for path, ratio in args.data:
        if ratio != "none" and not 0 < ratio <= 1:
            raise ConfigError(f"--data: ratio {ratio} of '{path}', expected one in (0, 1] or none")
    if not args.weights.is_file():
        raise ConfigError(f"--weights: '{args.weights}' does not exist; expected a file")


def open_report(args: argparse.Namespace, images: Images) -> report.Report:
    """The file of results, if it is of the same weights and images.

    Raises:
      ConfigError: if it is of others.
    """
    file = report.Report(args.json)
    about = {
        "weights": {
            "name": args.weights.name,
            "sha256": hashlib.sha256(args.weights.read_bytes()).hexdigest(),
        },
        "data": list(images.folders),
        "images_sha256": images.digest(),
        "mean": list(args.mean),
        "std": list(args.std),
    }
    for name, value in about.items():
        if file.content.get(name, value) != value:
            raise ConfigError(
                f"--json: '{args.json}' was measured with other {name}: give another file"
            )
    file.put(**about)
    return file


def measure(
    made: Mapping[Variant, Trunk],
    params: Any,
    images: Images,
    file: report.Report,
    args: argparse.Namespace,
) -> dict[Variant, report.Row]:
    """Rows of all variants, the unpruned one first; those that the file has are not measured."""
    rows = {variant_of(row): row for row in file.content["rows"]}
    base = None
    for variant, model in made.items():
        seeds = args.seeds if variant.draws() else 1
        row = rows.get(variant)
        if row is None or len(row.get("ranks", ())) != seeds:
            start = time.perf_counter()
            found = [
                ranks(model, (args.mean, args.std), params, images, seed, args.batch_size)
                for seed in range(seeds)
            ]
            row = make_row(variant, model, found, base)
            rows[variant] = row
            file.put(rows=list(rows.values()))
            accuracy = paired.percent(row["top1"])
            cli.say(f"{variant}: top-1 {accuracy} % in {time.perf_counter() - start:.0f} s")
        base = base or row
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Raises:
      ConfigError: on what the user has to mend, before anything is compiled.
    """
    args = parser().parse_args(argv)
    check(args)
    fields = untrained.model_fields(args.weights, args.heads, args.res)
    if args.reductions is None:
        args.reductions = untrained.parameter_free(fields)
    elif "none" in args.reductions:
        raise ConfigError("--reductions: 'none' is always measured; leave it out")
    made, unreachable = untrained.plan(fields, args.reductions, args.rates, args.fusion)
    params = trees.unflatten(load(str(args.weights), made[Variant()]).params)
    for model in {variant.reduction: model for variant, model in made.items()}.values():
        # Methods with parameters of their own (Cropr) need training and are refused here.
        check_match(params, models.abstract_params(model))
    images = read_images(args.data, made[Variant()])
    file = open_report(args, images)
    rows = measure(made, jax.device_put(params), images, file, args)
    rows |= {variant: unreachable_row(variant, why) for variant, why in unreachable.items()}
    file.put(rows=list(rows.values()))
    asked = [rows[variant] for variant in (*made, *unreachable)]
    text = paired.table(file.content | {"rows": asked})
    print(text)
    if args.markdown:
        paired.write_markdown(args.markdown, text)


if __name__ == "__main__":
    cli.run(main)
