"""Images per second of a predictor and of what it exports, side by side, in float32.

    python -m cropr_jax.bench.exported --config vit_ti,r=8,fusion=none --reduction attn_topk \
        --batch_size 1,8

Each round times the predictor, its `jax.export` artefact and, in onnxruntime, its ONNX file once,
in an order that moves on from round to round; ratios are medians of those within a round. Images go
in as uint8 on the host and logits come out there. Parameters are made up.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from cropr_jax import models, tasks
from cropr_jax.bench import methods, spec, throughput
from cropr_jax.bench.programs import Weights
from cropr_jax.errors import ConfigError
from cropr_jax.exported import load_exported, needs
from cropr_jax.host import cli
from cropr_jax.tasks.predictor import Predictor

Call = Callable[[UInt8[np.ndarray, "b h w 3"]], Float[np.ndarray, "b c"]]

PREPROCESS = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
TOLERANCE = 1e-4  # of logits, above which the comparison means nothing


def contestants(predictor: Predictor, folder: Path) -> dict[str, Call]:
    """What is timed, by the name of its row; the files go into `folder`.

    Raises:
      ConfigError: if the predictor cannot be exported, or a package is missing.
    """
    with needs("onnxruntime"):
        import onnxruntime
    predictor.export(folder / "model.cropr")
    predictor.export(folder / "model.onnx", format="onnx")
    loaded = load_exported(folder / "model.cropr")
    options = onnxruntime.SessionOptions()
    # Threads that wait by spinning would take their cores from the other two.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(folder / "model.onnx", options)
    return {
        "predictor": lambda images: np.asarray(predictor(images)),
        "jax.export": lambda images: np.asarray(loaded(images)),
        "onnxruntime": lambda images: np.asarray(session.run(["logits"], {"images": images})[0]),
    }


def measure(
    calls: dict[str, Call], images: UInt8[np.ndarray, "b h w 3"], rounds: int
) -> dict[str, Float[np.ndarray, "rounds"]]:
    """Images per second in each round.

    Raises:
      ConfigError: if the logits differ.
    """
    repeats, expected = {}, None
    for name, call in calls.items():
        logits = call(images)
        expected = logits if expected is None else expected
        if not np.allclose(logits, expected, atol=TOLERANCE, rtol=0):
            raise ConfigError(f"{name}: logits differ by {np.abs(logits - expected).max():.1e}")
        repeats[name] = math.ceil(throughput.ROUND_SECONDS / seconds(call, images, 1))
    found = {name: [] for name in calls}
    for turn in range(rounds):
        for name in throughput.rotate(list(calls), turn):
            found[name].append(len(images) / seconds(calls[name], images, repeats[name]))
    return {name: np.array(rates) for name, rates in found.items()}


def seconds(call: Call, images: UInt8[np.ndarray, "b h w 3"], repeats: int) -> float:
    """Wall time of a call, the mean over `repeats`."""
    start = time.perf_counter()
    for _ in range(repeats):
        call(images)
    return (time.perf_counter() - start) / repeats


def table(found: dict[str, Float[np.ndarray, "rounds"]]) -> str:
    """Medians and interquartile ranges in Markdown."""
    lines = ["| program | images/s | spread | ratio to the predictor | spread |"]
    lines.append("|---|--:|--:|--:|--:|")
    for name, rates in found.items():
        ratios = rates / found["predictor"]
        numbers = f"{np.median(rates):.1f} | {throughput.spread(rates):.1f}"
        numbers += f" | {np.median(ratios):.2f} | {throughput.spread(ratios):.2f}"
        lines.append(f"| {name} | {numbers} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = cli.parser("cropr_jax.bench.exported", __doc__)
    made.add_argument("--config", required=True, help="as of python -m cropr_jax.bench")
    made.add_argument("--reduction", default="cropr", help="method, 'none' for no pruning")
    made.add_argument(
        "--batch_size", type=cli.numbers, default=(1, 8), help="one or more, by comma"
    )
    made.add_argument("--rounds", type=int, default=15)
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Raises:
      ConfigError: on what the user has to mend.
    """
    args = parser().parse_args(argv)
    model = methods.create(args.config, args.reduction, methods.Settings())
    params = Weights().fill(models.abstract_params(model))
    task = tasks.get(spec.training_fields(args.config)["task"])
    predictor = task.predictor.from_model(model, params, PREPROCESS)
    with tempfile.TemporaryDirectory() as folder:
        calls = contestants(predictor, Path(folder))
        for size in args.batch_size:
            shape = (size, *model.image_size, 3)
            images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
            found = measure(calls, images, args.rounds)
            print(f"\nBatch {size}, {args.rounds} rounds\n\n{table(found)}")


if __name__ == "__main__":
    cli.run(main)
