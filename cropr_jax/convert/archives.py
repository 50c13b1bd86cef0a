"""Zip archives of arrays, as `.npz` and `.pth` are, and views of their bytes.

What is stored is mapped, what is compressed is inflated within bounds, and every entry that is read
is checked against its sum.
"""

import contextlib
import mmap
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import ml_dtypes
import numpy as np

from cropr_jax.convert.messages import shown
from cropr_jax.errors import ConfigError

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
CHUNK = 1 << 20
# Weights hardly compress, and are rarely tied: what becomes more than so many times the file, and
# more than so many bytes, is meant to fill the memory.
MAX_RATIO, MAX_INFLATED = 4, 1 << 30
ENCRYPTED = 0x1
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
        OSError,  # of a seek to before the start
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
        inflated = packed = 0
        for info in entries:
            if info.flag_bits & ENCRYPTED:
                raise ConfigError(f"its entry {shown(info.filename)} is encrypted")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ConfigError(
                    f"its entry {shown(info.filename)} is compressed by method "
                    f"{info.compress_type}; only stored and deflated entries are read"
                )
            inflated += info.file_size * (info.compress_type == zipfile.ZIP_DEFLATED)
            packed += info.compress_size
        self.check_size("entries", inflated)
        if packed > len(pages):  # each would be read to its end, though it is in others too
            raise ConfigError("its zip archive holds entries that overlap")

    def check_size(self, what: str, size: int) -> None:
        """Refuses to make much of little.

        Raises:
          ConfigError: if `size` bytes are more than an archive of this size may become.
        """
        if size > max(MAX_INFLATED, MAX_RATIO * len(self._pages)):
            raise ConfigError(
                f"its {what} inflate from {len(self._pages)} to {size} bytes, more than weights do"
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
            f"it holds an array of shape {shown(str(tuple(shape)))} and type {dtype} in "
            f"{len(buffer)} bytes"
        ) from error


def swapped(buffer: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A copy of big-endian numbers in native order, as bytes."""
    return buffer.view(f"u{dtype.itemsize}").byteswap().view(np.uint8)
