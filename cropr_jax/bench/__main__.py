r"""Times models, the input pipeline, or the device itself.

    python -m cropr_jax.bench --config vit_l,r=8,fusion=llf,res=224
    python -m cropr_jax.bench --config configs/in1k.py:vit_l --stage train --json speed.json
    python -m cropr_jax.bench --config vit_b --reduction all --batch_size 8
    python -m cropr_jax.bench --config eva02_l,head=segmentation,patch=16,res=512,classes=150,r=40 \
        --stage train_form,all_queries,slim
    python -m cropr_jax.bench --floor
    python -m cropr_jax.bench --input --config configs/in1k.py:vit_l

Variants need jax, flax, optax, einops and numpy alone; config files also ml_collections. With
`--json` a second start of the same command goes on where the first was cut.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from cropr_jax.bench import floor, methods, report, spec, throughput
from cropr_jax.bench.programs import INFERENCE, STAGES
from cropr_jax.errors import ConfigError
from cropr_jax.host import cli
from cropr_jax.host.messages import check_choice
from cropr_jax.models import DTYPES

ATTENTION = ("auto", "xla", "cudnn")


def batch(text: str) -> int:
    """'auto' -> 0, else a positive number."""
    size = 0 if text == "auto" else int(text)
    if size < 0 or text == "0":
        raise ValueError
    return size


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = cli.parser("cropr_jax.bench", __doc__)
    add = made.add_argument
    add(
        "--config",
        action="append",
        default=[],
        help="FILE.py:ARGS or VARIANT,KEY=VALUE,...; may be given several times",
    )
    add(
        "--reduction",
        type=cli.words,
        default=("none", "random", "cropr"),
        help="methods, by comma, options as in cropr:train_queries=128; 'all': every one there is",
    )
    add("--batch_size", type=batch, default=0, help="'auto' (each method's best) or a number")
    add(
        "--precision",
        type=cli.words,
        default=("float32",),
        help="float32, bfloat16, or both by comma",
    )
    add("--attention", type=cli.words, default=("auto",), help="auto, xla, cudnn, by comma")
    add("--rounds", type=int, default=15)
    add(
        "--stage",
        type=cli.words,
        default=("slim",),
        help="forms of the forward pass, or train for whole steps, by comma: " + ", ".join(STAGES),
    )
    add("--json", help="file for the results")
    add("--floor", action="store_true", help="measure a large matrix product and a large copy")
    add("--input", action="store_true", help="measure the input pipeline of the config")
    return made


def run_floor(file: report.Report) -> None:
    """Measures and prints the floor."""
    found = floor.measure()
    file.put(floor=found)
    rows = [
        (name.partition("_")[0] + " matrix product", f"{rate / 1e12:.3f} TMAC/s")
        for name, rate in found.items()
        if "macs" in name
    ]
    rows.append(("copy", f"{found['bytes_per_second'] / 1e9:.1f} GB/s"))
    print(report.format_table((file.content["device"], ""), rows), flush=True)


def run_input(configs: Sequence[str]) -> None:
    """Measures the input pipelines."""
    from cropr_jax.bench.input import input_benchmark

    for config in configs:
        if not spec.is_file(config):
            raise ConfigError(f"--config: '{config}' has no data; --input needs a config file")
        print(f"{config}\n{input_benchmark(spec.load_file(config))}", flush=True)


def check_methods(
    config: str, settings: methods.Settings
) -> tuple[methods.Settings, dict[str, str]]:
    """Settings with the methods that will be timed, and why some of 'all' will not be.

    Raises:
      ConfigError: if a method that was named cannot be, or none can.
    """
    if settings.reductions == ("all",):
        made, refused = methods.every_method(config, settings)
        return dataclasses.replace(settings, reductions=made), refused
    methods.create_all(config, settings)
    return settings, {}


def run_group(
    config: str, settings: methods.Settings, refused: Mapping[str, str], file: report.Report
) -> None:
    """Times one group, unless the file holds it, and prints its table."""
    shared = {name: getattr(settings, name) for name in ("precision", "attention")}
    made = methods.create_all(config, settings)
    found = [
        file.find(config=config, **shared, reduction=name, stage=stage)
        for name, stage in methods.entrants(made, settings.stages)
    ]
    rows = [
        row
        for row in found
        if row
        and row["rounds"] >= settings.rounds
        and settings.batch_size in (0, row["batch_size"])
    ]
    cli.say(f"{config}, {settings.precision}, attention {settings.attention}")

    def save(rows: Sequence[report.Row]) -> None:
        peak = file.content.get("floor")
        if peak:
            for row in rows:
                if row["stage"] in INFERENCE:
                    row["floor_share"] = floor.share(row, peak)
        file.add(rows)

    if len(rows) == len(found):
        cli.say(f"already in {file.path}")
    else:
        rows = throughput.measure(config, settings, cli.say, save)
    if refused:
        file.put(refused=file.content.get("refused", {}) | {config: dict(refused)})
    print(f"\n{config}, {settings.precision}, {file.content['device']}")
    print(report.table(rows, refused), flush=True)


def split_cpu(configs: Sequence[str]) -> None:
    """Makes the devices on which the configs train, of a machine without accelerators.

    Raises:
      ConfigError: if they ask for different ones.
    """
    from cropr_jax.train import sharding

    asked = {spec.training_fields(config).get("cpu_devices") for config in configs}
    if len(asked) > 1:
        raise ConfigError(f"--config: cpu_devices are {asked}; time these configs one by one")
    for devices in asked:
        sharding.split_cpu(devices)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Raises:
      ConfigError: on what the user has to mend.
    """
    args = parser().parse_args(argv)
    if not args.config and not args.floor:
        raise ConfigError("--config is missing, for example --config vit_l,r=8,fusion=llf")
    if args.rounds < 1:
        raise ConfigError(f"--rounds: found {args.rounds}, expected at least 1")
    if args.input:
        run_input(args.config)
        return
    if "train" in args.stage:
        split_cpu(args.config)
    groups = []
    for config, precision, attention in itertools.product(
        args.config, args.precision, args.attention
    ):
        settings = methods.Settings(
            reductions=args.reduction,
            batch_size=args.batch_size,
            precision=check_choice("precision", precision, DTYPES),
            attention=check_choice("attention", attention, ATTENTION),
            rounds=args.rounds,
            stages=tuple(check_choice("stage", stage, STAGES) for stage in args.stage),
        )
        groups.append((config, *check_methods(config, settings)))
    file = report.Report(args.json)
    if args.floor:
        run_floor(file)
    for config, settings, refused in groups:
        run_group(config, settings, refused, file)


if __name__ == "__main__":
    cli.run(main)
