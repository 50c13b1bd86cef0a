"""Artefacts of `cropr_jax.export` in format 'jax', read back: a predictor, or why it cannot be.

from cropr_jax.exported import load_exported
predictor = load_exported("digits.cropr")
logits = predictor(images)  # as predictor.metadata["input"] says
"""

import contextlib
import json
import tokenize
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export  # no attribute of jax until it is imported
import jax.numpy as jnp
import numpy as np

from cropr_jax.errors import ConfigError
from cropr_jax.host.version import __version__

LAYOUT = 1  # of the artefact; a reader refuses a later one


class ExportedPredictor:
    """A loaded artefact of format 'jax'.

    Attributes:
      metadata: what it says about itself, see `Traceable`.
    """

    def __init__(self, program: jax.export.Exported, params: list[Any], metadata: dict[str, Any]):
        self.metadata = metadata
        self._call = jax.jit(program.call)
        self._params = params

    def __call__(self, images: Any) -> jax.Array:
        """Float32 logits [b, c]; compiled once for each batch size.

        Args:
          images: [b, height, width, 3], as `metadata["input"]` says.

        Raises:
          ValueError: if they have another shape or type.
        """
        wanted = self.metadata["input"]
        if list(images.shape[1:]) != wanted["shape"][1:] or str(images.dtype) != wanted["dtype"]:
            raise ValueError(
                f"images are {images.dtype} {list(images.shape)}, expected {wanted['dtype']} "
                f"{wanted['shape']}: {wanted['values']}"
            )
        return self._call(self._params, images)


def load_exported(path: str | Path) -> ExportedPredictor:
    """Reads an artefact of format 'jax'.

    Raises:
      ConfigError: if the file is none, is damaged, or is too old or too new for this jax or
        cropr_jax; the message says which.
    """
    path = Path(path).expanduser()
    with readable(path), path.open("rb") as stream, np.load(stream) as file:
        metadata = json.loads(file["metadata"].tobytes())
        check_versions(path, metadata)
        serialized = bytearray(file["program"])
        params = [jax.device_put(retype(file[f"params/{name}"])) for name in metadata["params"]]
        example = metadata["input"]
        shape = jax.ShapeDtypeStruct((1, *example["shape"][1:]), example["dtype"])
    with needs("flatbuffers"):
        import flatbuffers  # noqa: F401
    try:
        program = jax.export.deserialize(serialized)
        # Traced once, so that what this jax does not know shows now.
        jax.jit(program.call).lower(params, shape)
    except Exception as error:  # of many types; the file is whole, so the format has changed
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"'{path}' {cannot_read(metadata)} ({reason})") from error
    return ExportedPredictor(program, params, metadata)


# What reading a damaged file raises in zipfile, json and NumPy, which tokenizes the headers of
# arrays as if they were Python.
DAMAGED = (
    EOFError,
    KeyError,
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,
    zipfile.BadZipFile,
)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Tells what is wrong with a file while it is read.

    Raises:
      ConfigError: instead of what reading raises.
    """
    try:
        yield
    except ConfigError:
        raise
    except FileNotFoundError as error:
        raise ConfigError(f"'{path}' does not exist") from error
    except DAMAGED as error:
        raise ConfigError(
            f"'{path}' is damaged, or not what Predictor.export writes with format='jax' ({error})"
        ) from error


def retype(array: np.ndarray) -> np.ndarray:
    """The array as bfloat16 if it is stored as two bytes, which is how NumPy writes that type."""
    return array.view(jnp.bfloat16) if array.dtype.kind == "V" else array


def check_versions(path: Path, metadata: Mapping[str, Any]) -> None:
    """Refuses artefacts outside what this cropr_jax and this jax read.

    Raises:
      ConfigError: saying what made the file.
    """
    if metadata["layout"] > LAYOUT:
        raise ConfigError(
            f"'{path}' has layout {metadata['layout']}, which cropr_jax {__version__} does not "
            f"know yet: use cropr_jax {metadata['versions']['cropr_jax']} or later"
        )
    low = jax.export.minimum_supported_calling_convention_version
    high = jax.export.maximum_supported_calling_convention_version
    found = metadata["calling_convention"]
    if not low <= found <= high:
        raise ConfigError(
            f"'{path}' is too {'old' if found < low else 'new'}: it {cannot_read(metadata)} "
            f"(calling convention {found}, expected {low} to {high})"
        )


def cannot_read(metadata: Mapping[str, Any]) -> str:
    """What to do about an artefact of other versions."""
    versions = metadata["versions"]
    return (
        f"was made by cropr_jax {versions['cropr_jax']} with jax {versions['jax']} on "
        f"{metadata['made'][:10]} and cannot be read by jax {jax.__version__}; export it again "
        "from the checkpoint, or use that jax"
    )


@contextlib.contextmanager
def needs(package: str) -> Iterator[None]:
    """Names the package of which a format consists, if it is missing.

    Raises:
      ConfigError: instead of ImportError.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"the package {package} is missing: pip install {package} ({error})"
        ) from error
