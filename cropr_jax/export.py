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
import contextlib
import datetime
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.export  # no attribute of jax until it is imported
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from cropr_jax import cli, inference
from cropr_jax.errors import ConfigError
from cropr_jax.exported import LAYOUT, needs
from cropr_jax.version import __version__

if TYPE_CHECKING:
    from cropr_jax.models.vit import ViT

FORMATS = ("jax", "onnx")
PLATFORMS = ("cpu", "cuda", "tpu")
# Types of images, and what their values are.
INPUTS = {
    "uint8": "RGB, 0 to 255",
    "float32": "RGB, (value / 255 - mean) / std with the numbers of preprocess",
}
BATCH = "batch"  # name of the symbolic dimension


def export(
    predictor: inference.Predictor, path: str | Path, format: str = "jax", input: str | None = None
) -> None:
    """Writes a predictor, the whole or nothing; see `Predictor.export`."""
    input = input or ("uint8" if predictor.preprocess else "float32")
    for name, value, options in (("format", format, FORMATS), ("input", input, INPUTS)):
        if value not in options:
            expected = " or ".join(map(repr, options))
            raise ConfigError(f"{name}: found {value!r}, expected {expected}")
    with new_file(path) as file:
        {"jax": write_jax, "onnx": write_onnx}[format](Traceable(predictor, input), file)


@contextlib.contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """A file to write; it becomes `path` when all went well.

    Raises:
      ConfigError: if `path` exists, or cannot be written.
    """
    target = Path(path).expanduser()
    if target.exists():
        raise ConfigError(f"'{target}' exists; remove it or name another file")
    if not target.parent.is_dir():
        raise ConfigError(f"'{target}' cannot be written: there is no folder '{target.parent}'")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield part
        part.rename(target)
    except OSError as error:
        raise ConfigError(f"'{target}' cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)


class Traceable:
    """A predictor as a function of its parameters, in a list, and images.

    Attributes:
      names, leaves: its parameters.
      images: shape and type of a batch.
      metadata: what an artefact says about itself, ready for JSON. The numbers `mean` and `std` of
        `preprocess` are applied inside if the input is uint8, else by whoever calls. `tokens` are
        those after each block and its site.
    """

    def __init__(self, predictor: inference.Predictor, input: str):
        # What 'auto' picks for the device at hand may not run on the others.
        self._model = predictor.model.clone(attention="xla", remat=False)
        self._normalize = predictor.normalization(np.dtype(input))
        flat = traverse_util.flatten_dict(predictor.params, sep="/")
        self.names, self.leaves = list(flat), list(flat.values())
        (batch,) = jax.export.symbolic_shape(BATCH)
        shape = (batch, *predictor.model.image_size, 3)
        self.images = jax.ShapeDtypeStruct(shape, np.dtype(input))
        logits = jax.eval_shape(self, self.leaves, self.images).shape[1:]
        self.metadata = {
            "made_by": "cropr_jax",
            "layout": LAYOUT,
            "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {"cropr_jax": __version__, "jax": jax.__version__},
            "input": {"shape": [BATCH, *shape[1:]], "dtype": input, "values": INPUTS[input]},
            "output": {"shape": [BATCH, *logits], "dtype": "float32", "values": "logits"},
            "preprocess": predictor.preprocess,
            "class_names": list(predictor.class_names),
            "tokens": tokens_after(predictor.model),
            "compute_dtype": jnp.dtype(predictor.model.dtype).name,
        }

    def __call__(self, leaves: Sequence[jax.Array], images: jax.Array) -> jax.Array:
        """Float32 logits [b, c], of segmentation [b, h, w, c]."""
        flat = dict(zip(self.names, leaves, strict=True))
        params = traverse_util.unflatten_dict(flat, sep="/")
        return inference.forward(self._model, self._normalize, (), params, images)[0]


def tokens_after(model: ViT) -> list[int]:
    """Tokens that leave each block and its site, the prefix counted."""
    height, width = model.grid
    inputs = model.schedule.block_inputs(height * width, model.prefix, fusion=False)
    removed_last = dict(model.schedule.sites).get(model.depth, 0)
    return [*inputs[1:], model.block_inputs()[-1] - removed_last]


def write_jax(traceable: Traceable, path: Path) -> None:
    """Writes format 'jax': an uncompressed `.npz`, whatever its name.

    Raises:
      ConfigError: if the package flatbuffers is missing.
    """
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in traceable.leaves]
    program = jax.export.export(jax.jit(traceable.__call__), platforms=PLATFORMS)(
        leaves, traceable.images
    )
    metadata = traceable.metadata | {
        "params": traceable.names,
        "platforms": list(program.platforms),
        "calling_convention": program.calling_convention_version,
    }
    with needs("flatbuffers"):
        serialized = program.serialize()
    arrays: dict[str, Any] = {
        "metadata": np.frombuffer(json.dumps(metadata).encode(), np.uint8),
        "program": np.frombuffer(serialized, np.uint8),
    }
    for name, leaf in zip(traceable.names, traceable.leaves, strict=True):
        arrays[f"params/{name}"] = np.asarray(leaf)
    with path.open("wb") as file:
        np.savez(file, **arrays)


def write_onnx(traceable: Traceable, path: Path) -> None:
    """Writes format 'onnx': input `images`, output `logits`, metadata as JSON under their names.

    Raises:
      ConfigError: if the package onnx is missing, or the model cannot be an ONNX graph.
    """
    if traceable.metadata["compute_dtype"] != "float32":
        raise ConfigError(
            f"format='onnx': the model computes in {traceable.metadata['compute_dtype']}, expected "
            "float32; load it with cropr_jax.load(path, dtype='float32')"
        )
    with needs("onnx"):
        from cropr_jax.to_onnx import convert
    params = dict(zip(traceable.names, map(np.asarray, traceable.leaves), strict=True))
    model = convert.convert(traceable, params, traceable.images, traceable.metadata)
    path.write_bytes(model)


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
    predictor = inference.load(args.workdir, dtype)
    predictor.export(args.out, format=args.format, input=args.input)
    print(f"{args.out}: {Path(args.out).stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    cli.run(main)
