"""Files of weights, told apart by their content and mapped rather than read.

Three formats: NumPy's `.npz`, safetensors, and PyTorch's `.pth` of version 1.6 and later (read
without PyTorch, see `pickles.py`). Numbers stay in the file until they are used, so that a file of
weights costs no memory beside what is made of it.

Source of the safetensors layout: huggingface/safetensors: README.md.
"""

import contextlib
import dataclasses
import importlib
import json
import mmap
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cropr_jax.convert.archives import CHUNK, TYPES, Archive, view
from cropr_jax.convert.messages import shown
from cropr_jax.convert.npz import read_npz
from cropr_jax.convert.pth import pickle_root, read_pth
from cropr_jax.errors import ConfigError

RESAVE = "re-save it where PyTorch is: torch.save(torch.load(path, map_location='cpu'), new_path)"
# Contents of other formats: offset, bytes, what it is and what to do.
FOREIGN = (
    (257, b"ustar", f"a tar archive, as PyTorch wrote at first; {RESAVE}"),
    (0, b"\x80", f"a bare pickle, as PyTorch wrote before 1.6; {RESAVE}"),
    (0, b"\x93NUMPY", "a single array; put the weights into one .npz, each under its name"),
    (0, b"\x89HDF", "HDF5; save its arrays as .npz"),
    (0, b"\x1f\x8b", "packed by gzip; unpack it first"),
    (0, b"version https://git-lfs", "a Git LFS pointer; fetch the file itself with git lfs pull"),
    (0, b"<", "a web page, it seems; download the file itself"),
)


@dataclasses.dataclass(frozen=True)
class Weights:
    """What a file holds.

    The arrays are read-only views of the mapped file, in its types and in native byte order;
    compressed and big-endian ones are copies. Tied parameters share memory. The file must not be
    written to while they are in use.
    """

    arrays: dict[str, np.ndarray]
    format: str  # 'npz', 'safetensors' or 'pth'
    wrapper: str  # the entry of the file that the arrays were taken from, '' if none
    metadata: dict[str, str]  # of safetensors
    _pages: mmap.mmap | None = dataclasses.field(default=None, repr=False, compare=False)

    def release(self) -> None:
        """Gives back the memory of what was read so far; reading an array again costs a read.

        Pages of a mapped file count as the process's memory until then.
        """
        if self._pages is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._pages.madvise(mmap.MADV_DONTNEED)


def read(path: str | os.PathLike[str], *, key: str | None = None) -> Weights:
    """Arrays of a file of weights; its format is told by its content.

    Sums of zip archives are checked. Whether numbers are finite is not: see `check_finite`.

    Args:
      path: a local file, `hf://owner/repository/file` (needs huggingface_hub), or another address
        that fsspec opens (needs fsspec).
      key: for `.pth`, the entry that holds the weights; by default the first of `pth.WRAPPERS`
        that does, unless the file holds weights alone.

    Raises:
      ConfigError: naming the file, what was found, and what was expected.
    """
    name = os.fspath(path)
    try:
        if "://" in name:
            return _read_remote(name, key)
        return _read_local(Path(os.path.expanduser(name)), key)
    except ConfigError as error:
        raise ConfigError(f"'{name}': {error}") from error
    except OSError as error:
        raise ConfigError(f"'{name}' cannot be read: {error.strerror or error}") from error


def check_finite(name: str, array: np.ndarray) -> None:
    """Refuses an array that holds NaN or infinity, without a copy of it.

    Raises:
      ConfigError: naming the array and how many such numbers it holds.
    """
    parts = np.nditer(
        array, ["external_loop", "buffered", "zerosize_ok"], order="K", buffersize=CHUNK
    )
    with np.errstate(invalid="ignore"):  # of signalling NaN
        bad = sum(int(np.size(part) - np.isfinite(part).sum()) for part in parts)
    if bad:
        raise ConfigError(
            f"weights: {shown(name)} holds {bad} NaN or infinite numbers of {array.size}; the file "
            "is damaged or its training diverged"
        )


def write_safetensors(
    path: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file: the whole or, on any failure, nothing.

    Args:
      path: a local file that does not exist.
      arrays: by name, of the types of `archives.TYPES`.
      metadata: text by name.

    Raises:
      ConfigError: if the file exists, cannot be written, or cannot hold an array.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    target = Path(path).expanduser()
    if target.exists():
        raise ConfigError(f"'{target}' exists; remove it or name another file")
    for name, array in arrays.items():
        if array.dtype.newbyteorder("=") not in TYPES.values():
            raise ConfigError(f"'{target}': {shown(name)} is {array.dtype}, unknown to safetensors")
    # The library writes memory as it lies, so that a transposed view would come out wrong.
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        save_file(dense, part, dict(metadata or {}))
        part.rename(target)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"'{target}' cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def _read_remote(address: str, key: str | None) -> Weights:
    if match := re.fullmatch(r"hf://([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)", address):
        hub = _package("huggingface_hub")
        repository, revision, file = match.groups()
        with _download():
            path = hub.hf_hub_download(repository, file, revision=revision)
        return _read_local(Path(path), key)
    fsspec = _package("fsspec")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights"
        with _download():
            system, place = fsspec.url_to_fs(address)
            system.get_file(place, os.fspath(path))
        # The mapping outlives the name, and the disk is free when the arrays are gone.
        return _read_local(path, key)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"such an address needs the package {name}: pip install {name}, or download the file "
            "and give its path"
        ) from error


@contextlib.contextmanager
def _download() -> Iterator[None]:
    """One error for the many that storage back ends raise."""
    try:
        yield
    except Exception as error:
        raise ConfigError(f"the download failed ({type(error).__name__}: {error})") from error


def _read_local(path: Path, key: str | None) -> Weights:
    if not path.is_file():
        found = "is no file" if path.exists() else "does not exist"
        raise ConfigError(f"it {found}; expected a .npz, .safetensors or .pth file")
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise ConfigError("it is empty; fetch it again")
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # Of a zip archive the first bytes, of safetensors the length of its header, under 100 MB.
        if pages[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
            archive = Archive(file, pages)
            root = pickle_root(archive)
            if root is None:
                weights = Weights(read_npz(archive), "npz", "", {})
            else:
                arrays, wrapper = read_pth(archive, root, key)
                weights = Weights(arrays, "pth", wrapper, {})
        elif pages[4:9] == b"\0\0\0\0{":
            weights = _read_safetensors(path, pages)
        else:
            raise ConfigError(_foreign(pages))
    if key is not None and weights.format != "pth":
        raise ConfigError(f"key={key!r} was given, but a {weights.format} file has no such entries")
    if not weights.arrays:
        raise ConfigError("it holds no arrays")
    for name in weights.arrays:
        if not name or not name.isprintable():
            raise ConfigError(
                f"it holds an array of the name {shown(name)}, which is no plain text"
            )
    return dataclasses.replace(weights, _pages=pages)


def _foreign(pages: mmap.mmap) -> str:
    """What a file of no known format seems to be."""
    for offset, start, what in FOREIGN:
        if pages[offset : offset + len(start)] == start:
            return f"it is {what}"
    return f"it starts with {pages[:16]!r}; expected a .npz, .safetensors or .pth file"


def _read_safetensors(path: Path, pages: mmap.mmap) -> Weights:
    from safetensors import SafetensorError, safe_open

    try:
        # The library checks the header: sizes, offsets without gap or overlap, length of the file.
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ConfigError(
            f"it is a damaged or cut short safetensors file ({error}); fetch it again"
        ) from error
    start = 8 + int.from_bytes(pages[:8], "little")
    header = json.loads(pages[8:start], object_pairs_hook=_unique)
    body = np.ndarray((len(pages) - start,), np.uint8, pages, start)
    arrays = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = TYPES.get(entry["dtype"])
        if dtype is None:
            raise ConfigError(
                f"{shown(name)} is of type {entry['dtype']}; expected real numbers of "
                "16 bits or more, or integers"
            )
        begin, end = entry["data_offsets"]
        arrays[name] = view(body[begin:end], dtype, tuple(entry["shape"]))
    return Weights(arrays, "safetensors", "", metadata)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two entries of one name the library would take the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ConfigError("its header holds two entries of one name")
    return found
