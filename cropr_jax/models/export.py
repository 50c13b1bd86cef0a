"""A predictor in one file that other programs run (`cropr_jax.export` says what is in it)."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.export  # no attribute of jax until it is imported
import jax.numpy as jnp
import numpy as np

from cropr_jax.core import trees
from cropr_jax.errors import ConfigError
from cropr_jax.exported import LAYOUT, needs
from cropr_jax.host.files import new_file
from cropr_jax.host.version import __version__
from cropr_jax.models.forward import forward
from cropr_jax.models.trunk import Trunk

FORMATS = ("jax", "onnx")
PLATFORMS = ("cpu", "cuda", "tpu")
# Types of images, and what their values are.
INPUTS = {
    "uint8": "RGB, 0 to 255",
    "float32": "RGB, (value / 255 - mean) / std with the numbers of preprocess",
}
BATCH = "batch"  # name of the symbolic dimension


@runtime_checkable
class Exportable(Protocol):
    """What is written of a predictor (`cropr_jax.tasks.predictor.Predictor`)."""

    model: Trunk
    params: Mapping[str, Any]
    preprocess: dict[str, Any] | None
    class_names: tuple[str, ...]

    def normalization(self, dtype: Any) -> tuple[np.ndarray, np.ndarray] | None:
        """(mean, std) for images of that type, None for normalised ones."""
        ...


def export(
    predictor: Exportable, path: str | Path, format: str = "jax", input: str | None = None
) -> None:
    """Writes a predictor, the whole or nothing; see `Predictor.export`."""
    input = input or ("uint8" if predictor.preprocess else "float32")
    for name, value, options in (("format", format, FORMATS), ("input", input, INPUTS)):
        if value not in options:
            expected = " or ".join(map(repr, options))
            raise ConfigError(f"{name}: found {value!r}, expected {expected}")
    with new_file(path) as file:
        {"jax": write_jax, "onnx": write_onnx}[format](Traceable(predictor, input), file)


class Traceable:
    """A predictor as a function of its parameters, in a list, and images.

    Attributes:
      names, leaves: its parameters.
      images: shape and type of a batch.
      metadata: what an artefact says about itself, ready for JSON. The numbers `mean` and `std` of
        `preprocess` are applied inside if the input is uint8, else by whoever calls. `tokens` are
        those after each block and its site.
    """

    def __init__(self, predictor: Exportable, input: str):
        # What 'auto' picks for the device at hand may not run on the others.
        self._model = predictor.model.clone(attention="xla", remat=False)
        self._normalize = predictor.normalization(np.dtype(input))
        flat = trees.flatten(predictor.params)
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
        params = trees.unflatten(flat)
        return forward(self._model, self._normalize, (), params, images)[0]


def tokens_after(model: Trunk) -> list[int]:
    """Tokens that leave each block and its site, the prefix counted."""
    inputs = model.schedule.block_inputs(model.patches, model.prefix, fusion=False)
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
        from cropr_jax.models.to_onnx import convert
    params = dict(zip(traceable.names, map(np.asarray, traceable.leaves), strict=True))
    model = convert.convert(traceable, params, traceable.images, traceable.metadata)
    path.write_bytes(model)
