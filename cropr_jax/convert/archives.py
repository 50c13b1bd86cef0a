"""Zip archives of arrays: NumPy's `.npz` and PyTorch's `.pth`.

What is stored is mapped, what is compressed is inflated within bounds, and every entry that is read
is checked against its sum.

Sources: numpy/numpy: numpy/lib/_format_impl.py (`.npy` headers); pytorch/pytorch:
torch/serialization.py (entries of a `.pth`).
"""

import contextlib
import math
import mmap
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from cropr_jax.convert import pickles
from cropr_jax.convert.pickles import shown
from cropr_jax.errors import ConfigError

# Where checkpoints keep their weights, in the order in which they are looked for: MAE and EVA load
# `model`, then `module` (DeepSpeed); averages and timm's and Lightning's names come after.
WRAPPERS = ("model", "module", "model_ema", "state_dict", "state_dict_ema")

# By safetensors' names. Complex and 8-bit floating types are refused.
TYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
# NumPy's codes without the byte order. bfloat16 is unknown to `.npy`, which calls it V2.
NPY_TYPES = {dtype.str[1:]: dtype for dtype in TYPES.values()}
NPY_HEADER = re.compile(
    rb"\s*\{\s*'descr':\s*'([<>=|]?)(\w+)',\s*'fortran_order':\s*(True|False),"
    rb"\s*'shape':\s*\(([\dL, ]*)\),?\s*\}\s*"
)

CHUNK = 1 << 20
# Weights hardly compress: what does, by more than this and to more than this, is a zip bomb.
MAX_RATIO, MAX_INFLATED = 100, 1 << 30
ENCRYPTED = 0x1
MAX_HEADER = 10_000  # bytes of the text that describes a .npy array
LOCAL_HEADER = 30  # bytes before name and extra field, whose lengths are its last two numbers


@contextlib.contextmanager
def _damage(what: str) -> Iterator[None]:
    """Turns what zipfile raises on damaged archives into one error."""
    try:
        yield
    except ConfigError:
        raise
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        EOFError,
        OverflowError,
        RuntimeError,
        ValueError,
    ) as error:
        raise ConfigError(
            f"{what} is damaged or cut short ({shown(str(error))}); fetch the file again"
        ) from error


class Archive:
    """An open zip archive.

    Args:
      file: the archive, open for as long as entries are read.
      pages: the same file, mapped.

    Raises:
      ConfigError: if it is damaged, encrypted, packed by an unusual method, or a zip bomb.
    """

    def __init__(self, file: BinaryIO, pages: mmap.mmap):
        self._pages = pages
        with _damage("the zip archive"):
            self._zip = zipfile.ZipFile(file)
        entries = self._zip.infolist()
        self._entries = {info.filename: info for info in entries}
        self.names = list(self._entries)
        if len(self.names) != len(entries):
            raise ConfigError("its zip archive holds two entries of one name")
        inflated = 0
        for info in entries:
            if info.flag_bits & ENCRYPTED:
                raise ConfigError(f"its entry {shown(info.filename)} is encrypted")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ConfigError(
                    f"its entry {shown(info.filename)} is compressed by method "
                    f"{info.compress_type}; only stored and deflated entries are read"
                )
            inflated += info.file_size * (info.compress_type == zipfile.ZIP_DEFLATED)
        if inflated > max(MAX_INFLATED, MAX_RATIO * len(pages)):
            raise ConfigError(
                f"its entries inflate from {len(pages)} to {inflated} bytes, more than weights do"
            )

    def content(self, name: str) -> np.ndarray:
        """Bytes of an entry [n], uint8: mapped if it is stored, else in memory.

        Raises:
          ConfigError: if there is no such entry, or it is damaged.
        """
        info = self._entries.get(name)
        if info is None:
            raise ConfigError(f"its zip archive lacks the entry {shown(name)}")
        stored = info.compress_type == zipfile.ZIP_STORED
        inflated = np.empty(0 if stored else info.file_size, np.uint8)
        position = 0
        with _damage(f"its entry {shown(name)}"):
            # Read to its end, whatever is done with it, since that is when its sum is checked.
            with self._zip.open(info) as stream:
                while chunk := stream.read(CHUNK):
                    if not stored:
                        inflated[position : position + len(chunk)] = np.frombuffer(chunk, np.uint8)
                    position += len(chunk)
            if position != info.file_size:
                raise EOFError(f"{position} of {info.file_size} bytes")
            if not stored:
                return inflated
            start = info.header_offset + LOCAL_HEADER
            lengths = struct.unpack("<HH", self._pages[start - 4 : start])
            return np.ndarray((position,), np.uint8, self._pages, start + sum(lengths))


def view(
    buffer: np.ndarray,
    dtype: np.dtype,
    shape: Sequence[int],
    offset: int = 0,
    strides: Sequence[int] | None = None,
) -> np.ndarray:
    """A view of bytes as an array.

    Args:
      buffer: [n] uint8.
      dtype: type of the numbers, in native byte order.
      shape: sizes of the view.
      offset: where it starts, in numbers.
      strides: steps along its axes, in numbers; dense in C order if None.

    Raises:
      ConfigError: if it does not lie within the bytes.
    """
    width = dtype.itemsize
    steps = None if strides is None else [step * width for step in strides]
    try:
        return np.ndarray(shape, dtype, buffer, offset * width, steps)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"it holds an array of shape {tuple(shape)} and type {dtype} in {len(buffer)} bytes"
        ) from error


def _swapped(buffer: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A copy of big-endian numbers in native order, as bytes."""
    return buffer.view(f"u{dtype.itemsize}").byteswap().view(np.uint8)


def read_npz(archive: Archive) -> dict[str, np.ndarray]:
    """Arrays of an `.npz` by name.

    Raises:
      ConfigError: if an entry is no array of real numbers.
    """
    arrays = {}
    for name in archive.names:
        if not name.endswith(".npy"):
            raise ConfigError(
                f"it is a zip archive with the entry {shown(name)}; expected one of .npy arrays, "
                "or PyTorch's with a data.pkl"
            )
        arrays[name.removesuffix(".npy")] = _npy(name, archive.content(name))
    return arrays


def _npy(name: str, content: np.ndarray) -> np.ndarray:
    """The array of a `.npy` file; objects, text, complex numbers and records are refused."""
    magic, version = content[:6].tobytes(), content[6:7].tobytes()
    width = {b"\x01": 2, b"\x02": 4}.get(version)
    if magic != b"\x93NUMPY" or width is None:
        raise ConfigError(f"its entry {shown(name)} is no array of .npy format 1 or 2")
    start = 8 + width
    length = int.from_bytes(content[8:start].tobytes(), "little")
    header = content[start : start + min(length, MAX_HEADER)].tobytes()
    match = NPY_HEADER.fullmatch(header)
    if match is None:
        raise ConfigError(
            f"its entry {shown(name)} has the header {header[:80]!r}; expected one of "
            "a plain array of numbers"
        )
    order, code, fortran, sizes = (group.decode("ascii") for group in match.groups())
    dtype = NPY_TYPES.get(code)
    if dtype is None:
        raise ConfigError(
            f"its entry {shown(name)} is of NumPy's type {shown(order + code)}; expected real "
            "numbers (objects are never unpickled)"
        )
    shape = tuple(int(size.rstrip("L")) for size in sizes.replace(" ", "").split(",") if size)
    numbers = content[start + length :]
    if len(numbers) != math.prod(shape) * dtype.itemsize:
        raise ConfigError(
            f"its entry {shown(name)} of shape {shape} and type {dtype} has {len(numbers)} bytes"
        )
    if order == ">" and dtype.itemsize > 1:
        numbers = _swapped(numbers, dtype)
    if fortran == "True":
        return view(numbers, dtype, shape[::-1]).T
    return view(numbers, dtype, shape)


def pickle_root(archive: Archive) -> str | None:
    """The folder of a PyTorch archive's `data.pkl`, with its slash; None if it has none.

    Raises:
      ConfigError: if it has several, or is TorchScript's.
    """
    roots = [
        name.removesuffix("data.pkl")
        for name in archive.names
        if re.fullmatch(r"([^/]+/)?data\.pkl", name)
    ]
    if len(roots) > 1:
        raise ConfigError(f"it holds {len(roots)} files data.pkl; expected one")
    if roots and f"{roots[0]}constants.pkl" in archive.names:
        raise ConfigError(
            "it is a TorchScript program, which is never run; load it with PyTorch and save its "
            "state_dict()"
        )
    return roots[0] if roots else None


def read_pth(archive: Archive, root: str, key: str | None) -> tuple[dict[str, np.ndarray], str]:
    """Arrays of a PyTorch archive by name, and the entry that they were taken from.

    Storages that no chosen tensor needs are not read. Tied tensors are views of one storage.

    Args:
      archive: the archive.
      root: its `pickle_root`.
      key: the entry to take, or None for the first of `WRAPPERS`.

    Raises:
      ConfigError: if pickle, entries or storages are not those of a dict of tensors.
    """
    tensors, wrapper = _unwrap(pickles.loads(archive.content(f"{root}data.pkl").tobytes()), key)
    order = b"little"
    if f"{root}byteorder" in archive.names:
        order = archive.content(f"{root}byteorder")[:80].tobytes()
        if order not in (b"little", b"big"):
            raise ConfigError(f"its entry {root}byteorder is {order!r}; expected little or big")
    storages = {}
    for storage in {tensor.storage for tensor in tensors.values()}:
        content = archive.content(f"{root}data/{storage.key}")
        if len(content) != storage.numel * storage.dtype.itemsize:
            raise ConfigError(
                f"its storage {shown(storage.key)} has {len(content)} bytes; expected "
                f"{storage.numel} numbers of {storage.dtype}"
            )
        storages[storage] = _swapped(content, storage.dtype) if order == b"big" else content
    arrays = {
        name: view(
            storages[tensor.storage],
            tensor.storage.dtype,
            tensor.size,
            tensor.offset,
            tensor.stride,
        )
        for name, tensor in tensors.items()
    }
    return arrays, wrapper


def _unwrap(tree: Any, key: str | None) -> tuple[dict[str, pickles.Tensor], str]:
    """The dict of tensors in a checkpoint, and the name of the entry that holds it."""
    if not isinstance(tree, dict):
        raise ConfigError(f"it holds a {type(tree).__name__}; expected a dict of tensors")
    wrapper = key or ""
    if key is not None and not isinstance(tree.get(key), dict):
        raise ConfigError(f"it has no dict under key={key!r}; it holds {_listed(tree)}")
    if key is None and not all(isinstance(value, pickles.Tensor) for value in tree.values()):
        wrapper = next((name for name in WRAPPERS if isinstance(tree.get(name), dict)), "")
    chosen = tree[wrapper] if wrapper or key is not None else tree
    for name, value in chosen.items():
        if not isinstance(name, str) or not isinstance(value, pickles.Tensor):
            raise ConfigError(
                f"its entry {shown(str(name))} is a {type(value).__name__}; expected tensors alone "
                f"under {wrapper!r}, or one of {', '.join(WRAPPERS)}; choose with key=. It holds "
                f"{_listed(tree)}"
            )
    return chosen, wrapper


def _listed(tree: dict[Any, Any]) -> str:
    names = [shown(str(name)) for name in list(tree)[:8]]
    return ", ".join(names) + (f" and {len(tree) - 8} more" if len(tree) > 8 else "")
