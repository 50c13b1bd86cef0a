"""Random access to TFRecord files without TensorFlow.

A TFRecord file is a sequence of records, each: data length (8 bytes, little-endian), masked CRC-32C
of these 8 bytes (4), the data, masked CRC-32C of the data (4). Nothing in it says where record i
starts, so one pass over the lengths makes an offset index, which is kept in the user's cache and
used as long as path, size and modification time of the file stay the same.

Format: tensorflow/tensorflow `tensorflow/core/lib/io/record_writer.h` and `lib/hash/crc32c.h`.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

import google_crc32c
import numpy as np
from absl import logging

from cropr_jax.errors import ConfigError

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8
# ImageNet has 1024 shards, and 1024 is the usual limit on a process's open files.
_MAX_OPEN_FILES = 512


class RecordFileError(ConfigError):
    """A TFRecord file is missing, cut short, damaged, or not what the data set says it is."""


def masked_crc32c(data: bytes) -> int:
    """CRC-32C of `data`, rotated right by 15 bits plus a constant, as TFRecord stores it."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/cropr_jax`, by default `~/.cache/cropr_jax`."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "cropr_jax"


def write_records(path: str | os.PathLike, records: Sequence[bytes]) -> None:
    """Writes `records` as one TFRecord file."""
    with open(path, "wb") as file:
        for data in records:
            length = struct.pack("<Q", len(data))
            file.write(length + _FOOTER.pack(masked_crc32c(length)))
            file.write(data + _FOOTER.pack(masked_crc32c(data)))


def scan_offsets(path: str | os.PathLike) -> np.ndarray:
    """Offsets of all records of one file, by reading only the record headers.

    Returns:
      int64 [n + 1]: where the header of record i starts; the last entry is the size of the file.

    Raises:
      RecordFileError: the file is missing, is not a TFRecord file, or ends inside a record.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise RecordFileError(
            f"{path}: shard not found. Copy it again, or prepare the data set anew."
        )
    size = os.path.getsize(path)
    offsets = [0]
    # Unbuffered: a buffered reader would read the images between the headers too.
    with open(path, "rb", buffering=0) as file:
        while offsets[-1] < size:
            start = offsets[-1]
            file.seek(start)
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise _truncated(path, size, len(offsets) - 1, start + _HEADER.size)
            length, crc = _HEADER.unpack(header)
            if masked_crc32c(header[:8]) != crc:
                what = "not a TFRecord file" if start == 0 else f"damaged at byte {start}"
                raise RecordFileError(
                    f"{path}: {what}: the checksum of the length of record {len(offsets) - 1} is "
                    f"{crc:#010x}, expected {masked_crc32c(header[:8]):#010x}. "
                    "Check the path, or copy the file again."
                )
            stop = start + _HEADER.size + length + _FOOTER.size
            if stop > size:
                raise _truncated(path, size, len(offsets) - 1, stop)
            offsets.append(stop)
    return np.asarray(offsets, np.int64)


def load_offsets(path: str | os.PathLike) -> np.ndarray:
    """`scan_offsets` through the cache; a changed file, or a damaged index, is scanned again.

    A cache that cannot be written costs a warning, and the scan of every start.
    """
    path = os.path.abspath(path)
    if not os.path.isfile(path):
        return scan_offsets(path)
    stat = os.stat(path)
    key = hashlib.sha256(f"{path}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:32]
    cached = cache_dir() / "tfrecord_index" / f"{key}.npy"
    if (kept := _kept(cached, stat.st_size)) is not None:
        return kept
    offsets = scan_offsets(path)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed, so that a second process never reads half an index.
        with tempfile.NamedTemporaryFile(dir=cached.parent, suffix=".tmp", delete=False) as file:
            np.save(file, offsets)
        os.replace(file.name, cached)
    except OSError as error:
        logging.warning("the index of %s cannot be kept in %s (%s)", path, cached.parent, error)
    return offsets


def _kept(cached: Path, size: int) -> np.ndarray | None:
    """The offsets of a cached index; None if there is none, or it is damaged.

    Args:
      cached: file of the index.
      size: of the file that it is of, in bytes.
    """
    try:
        with cached.open("rb") as file:
            offsets = np.load(file)
    except (OSError, ValueError, EOFError):
        return None
    whole = offsets.ndim == 1 and offsets.dtype == np.int64 and offsets.size > 0
    return offsets if whole and offsets[-1] == size else None


class TFRecordReader:
    """The records of several TFRecord files as one random-access sequence of bytes.

    Picklable: each process opens its own file handles, when it first needs them.

    Args:
      paths: the shards, in the order of the data set.
      shard_lengths: how many records each is said to hold (`SplitInfo.shard_lengths` of TFDS).

    Raises:
      RecordFileError: a shard is missing, cut short, empty when it should hold records, holds
        another number of records than stated, or is no TFRecord file.
    """

    def __init__(self, paths: Sequence[str | os.PathLike], shard_lengths: Sequence[int]):
        if len(paths) != len(shard_lengths):
            raise RecordFileError(
                f"found {len(paths)} shard files, expected {len(shard_lengths)} "
                f"(first: {paths[0] if paths else 'none'}). Prepare the data set anew."
            )
        self._paths = [os.fspath(path) for path in paths]
        self._offsets = []
        for path, expected in zip(self._paths, shard_lengths, strict=True):
            offsets = load_offsets(path)
            found = len(offsets) - 1
            if found != expected:
                what = "empty shard" if found == 0 else "wrong number of records"
                raise RecordFileError(
                    f"{path}: {what}: found {found} records, expected {expected} (the data set's "
                    "shard_lengths). Copy the shard again, or prepare the data set anew."
                )
            self._offsets.append(offsets)
        self._ends = np.cumsum([len(o) - 1 for o in self._offsets], dtype=np.int64)
        self._files: dict[int, int] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        shard = int(np.searchsorted(self._ends, index, side="right"))
        offsets = self._offsets[shard]
        position = index - (int(self._ends[shard]) - (len(offsets) - 1))
        start, stop = int(offsets[position]), int(offsets[position + 1])
        blob = self._read(shard, start, stop)
        data = blob[_HEADER.size : -_FOOTER.size]
        if len(blob) != stop - start or masked_crc32c(data) != _FOOTER.unpack(blob[-4:])[0]:
            raise RecordFileError(
                f"{self._paths[shard]}: record {position} (bytes {start} to {stop}) is damaged: "
                "its checksum does not match. Copy the shard again."
            )
        return data

    def _read(self, shard: int, start: int, stop: int) -> bytes:
        handle = self._files.get(shard)
        if handle is None:
            handle = os.open(self._paths[shard], os.O_RDONLY)
            if len(self._files) >= _MAX_OPEN_FILES:
                try:
                    return os.pread(handle, stop - start, start)
                finally:
                    os.close(handle)
            kept = self._files.setdefault(shard, handle)
            if kept != handle:  # another thread was first
                os.close(handle)
                handle = kept
        # pread keeps no position, so threads may share the handle.
        return os.pread(handle, stop - start, start)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_files": {}}

    def __del__(self):
        for handle in self.__dict__.get("_files", {}).values():
            os.close(handle)


def _truncated(path: str, size: int, record: int, expected: int) -> RecordFileError:
    return RecordFileError(
        f"{path}: truncated shard: record {record} ends after byte {expected}, the file after "
        f"{size}. Copy the shard again."
    )
