"""Trains, evaluates and times token reduction methods on one recipe, and writes their table.

    python -m cropr_jax.compare --config configs/cifar10.py:vit_ti,fusion=none \\
        --reductions none,random,cropr --seeds 0,1,2 --workdir runs/compare --out results/cifar10 \\
        --config.init=vit_tiny_patch16_224.npz

Every run has a directory of its own, so the same command goes on where it was cut, and a second
command with other methods or seeds on the same --workdir adds them to the table.
`--config.field=value` holds for all runs; options of one method stand behind its name, so that
`--reductions cropr,cropr:mlp=False` compares it with and without.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from cropr_jax import train
from cropr_jax.bench import methods, paired, report, throughput
from cropr_jax.compare import plan, table
from cropr_jax.compare.plan import Entry, Plan
from cropr_jax.errors import ConfigError
from cropr_jax.host import cli, config_file
from cropr_jax.host.files import write_json
from cropr_jax.host.version import revision
from cropr_jax.tasks import Metric
from cropr_jax.train import processes
from cropr_jax.visualize import seeds, tradeoff

SEEDS = "seeds.json"  # what the table holds: entries and their seeds, of all commands


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = cli.parser("cropr_jax.compare", __doc__)
    add = made.add_argument
    add("--config", required=True, help="FILE or FILE:VARIANT,KEY=VALUE,... as run.py takes it")
    add("--reductions", type=cli.words, required=True, help="NAME or NAME:OPTION=VALUE, by comma")
    add("--schedules", type=cli.words, default=("per_block",), help="by comma")
    add("--rates", type=cli.numbers, default=(-1,), help="R, by comma; default: the config's own")
    add("--fusions", type=cli.words, default=("",), help="by comma; default: the config's own")
    add("--seeds", type=cli.numbers, default=(0,), help="by comma")
    add("--workdir", type=Path, required=True, help="where the runs are kept")
    add("--out", type=Path, required=True, help="path of the results without suffix")
    add("--rounds", type=int, default=15, help="of the timing; 0 for none")
    add("--batch_size", type=int, default=0, help="of the timing; 0: each method's best")
    add("--cache_dir", default=processes.PROGRAMS, help="of compiled programs; '' for nowhere")
    return made


def remember(path: Path, rows: Sequence[Entry], drawn: Sequence[int]) -> dict[Entry, list[int]]:
    """Seeds of every entry that this and earlier commands on the directory asked for."""
    found: dict[Entry, list[int]] = {}
    if path.exists():
        found = {Entry(*entry): before for entry, before in json.loads(path.read_text())}
    for entry in rows:
        found[entry] = sorted({*found.get(entry, []), *drawn})
    content = [[dataclasses.astuple(entry), before] for entry, before in found.items()]
    write_json(path, content, indent=1)
    return found


def train_all(planned: Plan) -> dict[Entry, list[dict[str, Any]]]:
    """Runs what is not there yet. Returns the results of each entry."""
    runs = [run for group in planned.runs.values() for run in group]
    for run in runs:
        run.result()  # refuses runs of another recipe before any training
    results: dict[Entry, list[dict[str, Any]]] = {}
    for number, run in enumerate(runs, 1):
        result = run.result()
        if result is None:
            cli.say(f"run {number} of {len(runs)}: {run.entry.label}, seed {run.seed}")
            result = train.train(run.config, run.workdir)
            jax.clear_caches()  # every run compiles its own programs
        if result is None:
            raise SystemExit(0)  # asked to stop; the same command goes on
        results.setdefault(run.entry, []).append(result)
    return results


def time_all(planned: Plan, file: report.Report, args: argparse.Namespace) -> dict[str, report.Row]:
    """Images per second of every entry, all in one interleaved measurement."""
    made = {entry.label: runs[0].recipe.model for entry, runs in planned.runs.items()}
    settings = methods.Settings(
        reductions=tuple(made), batch_size=args.batch_size, rounds=args.rounds
    )
    rows = {row["reduction"]: row for row in file.content["rows"]}
    if not made.keys() <= rows.keys() and args.rounds:
        measured = throughput.race(args.config, made, settings, {}, cli.say, file.add)
        rows = {row["reduction"]: row for row in measured}
    return rows


def make_row(
    entry: Entry,
    drawn: Sequence[int],
    results: Sequence[dict[str, Any]],
    metric: Metric,
    speed: Any,
) -> report.Row:
    """One row: accuracy over seeds of the first split, costs, speed."""
    first = results[0]
    split = next(iter(first["metrics"]))
    reduction = first["config"]["model"]["reduction"]
    return {
        "reduction": entry.reduction,
        "schedule": entry.schedule,
        "rate": reduction["rate"] if entry.schedule else None,
        "fusion": entry.fusion,
        "split": split,
        "metric": metric.name,
        "metric_label": metric.label,
        "seeds": list(drawn),
        **table.summary([result["metrics"][split][metric.name] for result in results]),
        "examples": first["metrics"][split]["examples"],
        **{name: first[name] for name in ("tpr", "tokens", "params", "params_slim")},
        **{name: first[name] for name in ("macs_linear", "macs_all")},
        "images_per_second": speed and speed["images_per_second"],
        "ratio": speed and speed["ratio"],
        "batch_size": speed and speed["batch_size"],
    }


def write(out: Path, rows: Sequence[report.Row], about: dict[str, Any]) -> None:
    """Writes `out`.md (between its marks), .csv and .json.

    Beside them `out`.png, of what was timed, and `out`_seeds.png, of what has several seeds.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    head = f"{about['device']}; revision {about['revision']}; {versions}."
    paired.write_markdown(out.with_suffix(".md"), f"{head}\n\n{table.markdown(rows)}")
    out.with_suffix(".csv").write_text(table.comma_separated(rows))
    write_json(out.with_suffix(".json"), {"rows": rows, **about}, indent=1)
    metric = table.metric_name(rows)
    if any(row.get("images_per_second") for row in rows):
        tradeoff.plot(rows, out.with_suffix(".png"), metric)
    if any(len(row.get("values", ())) > 1 for row in rows):
        seeds.plot(rows, out.with_name(f"{out.stem}_seeds.png"), metric)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Raises:
      ConfigError: on what the user has to mend.
    """
    args, overrides = parser().parse_known_args(argv)
    for word in overrides:
        if not word.startswith("--config."):
            raise ConfigError(f"unknown argument '{word}'")
    config = config_file.load(args.config, overrides)
    # A second seed has the programs of the first.
    processes.set_up(args.cache_dir, config.get("cpu_devices"))
    rows = plan.entries(args.reductions, args.schedules, args.rates, args.fusions)
    plan.make(args.config, overrides, {row: args.seeds for row in rows}, args.workdir)
    wanted = remember(args.workdir / SEEDS, rows, args.seeds)
    planned = plan.make(args.config, overrides, wanted, args.workdir)
    results = train_all(planned)
    speed = time_all(planned, report.Report(args.workdir / "speed.json"), args)
    metric = next(iter(planned.runs.values()))[0].recipe.task.metric
    found = [
        make_row(entry, wanted[entry], results[entry], metric, speed.get(entry.label))
        for entry in planned.runs
    ]
    found += [
        dataclasses.asdict(entry) | {"unreachable": why}
        for entry, why in planned.unreachable.items()
    ]
    write(args.out, found, report.environment() | {"revision": revision(), "config": args.config})
    print(table.markdown(found), flush=True)
    cli.say(f"written: {args.out}.md, .csv, .json and pictures")


if __name__ == "__main__":
    cli.run(main)
