"""A predictor in one file that other programs run.

    python -m cropr_jax.export --workdir runs/digits digits.cropr
    python -m cropr_jax.export --workdir runs/digits digits.onnx --format onnx

or `Predictor.export` of any predictor. Format 'jax' holds a `jax.export` program for cpu, cuda and
tpu and any batch size. It needs jax and flatbuffers (which jax asks for, but does not install), and
nothing of cropr_jax or flax:

    import json
    import jax.export
    import numpy as np

    with np.load("digits.cropr") as file:
        program = jax.export.deserialize(bytearray(file["program"]))
        metadata = json.loads(bytes(file["metadata"]))
        params = [
            jax.device_put(file[f"params/{name}"].view(aval.dtype))
            for name, aval in zip(metadata["params"], program.in_avals)
        ]
    logits = jax.jit(program.call)(params, images)  # as metadata["input"] says

jax promises to read such a program for half a year; `cropr_jax.exported` tells when it no longer
can, so keep the checkpoint. The weights stand beside the program rather than in it: as constants
they would be copied at every step from tracing to writing, meet the 2 GiB limit of flatbuffers, and
lie in memory once more for every batch size that is compiled.

Format 'onnx' needs the package onnx to write, and onnxruntime to run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cropr_jax.errors import ConfigError
from cropr_jax.host import cli
from cropr_jax.models.export import FORMATS, INPUTS
from cropr_jax.runs.load import load


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = cli.parser("cropr_jax.export", __doc__)
    made.add_argument("--workdir", required=True, help="of a run, or one of its checkpoints")
    made.add_argument("out", help="file to write")
    made.add_argument("--format", choices=FORMATS, default="jax")
    made.add_argument("--input", choices=tuple(INPUTS), default="uint8", help="type of the images")
    made.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="compute dtype; by default the run's, float32 for onnx",
    )
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Raises:
      ConfigError: on what the user has to mend.
    """
    args = parser().parse_args(argv)
    if Path(args.out).exists():  # before the checkpoint is read
        raise ConfigError(f"'{args.out}' exists; remove it or name another file")
    dtype = args.dtype or ("float32" if args.format == "onnx" else None)
    predictor = load(args.workdir, dtype)
    predictor.export(args.out, format=args.format, input=args.input)
    print(f"{args.out}: {Path(args.out).stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    cli.run(main)
