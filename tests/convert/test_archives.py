"""Zip archives: sums, bombs, and entries that are not what they seem."""

import struct
import warnings
import zipfile

import numpy as np
import pytest
from weight_files import (
    GOOD,
    WRITERS,
    check,
    npy,
    write_npz,
    write_pth,
    write_zip,
)

from cropr_jax.convert import archives, files
from cropr_jax.errors import ConfigError


@pytest.mark.parametrize("writer", ["npz", "npz compressed", "pth", "pth compressed"])
def test_a_changed_number_is_noticed(tmp_path, writer):
    array = np.random.default_rng(0).normal(size=300).astype(np.float32)
    path = WRITERS[writer](tmp_path / "w", {"w": array})
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
    data[largest.header_offset + 500] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="damaged or cut short.*fetch the file again"):
        files.read(path)


def test_encrypted_and_doubled_entries_are_refused(tmp_path):
    path = write_zip(tmp_path / "w", [("a.npy", npy(GOOD, bytes(4)))])
    data = path.read_bytes()
    locked = bytearray(data)
    locked[6] |= 1
    locked[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(locked)
    with pytest.raises(ConfigError, match="'a.npy' is encrypted"):
        files.read(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile sees it too
        write_zip(path, [("a.npy", npy(GOOD, bytes(4)))] * 2)
    with pytest.raises(ConfigError, match="two entries of one name"):
        files.read(path)


def test_zip_bombs_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_INFLATED", 1 << 20)
    zeros = {"w": np.zeros(1 << 19, np.float32)}
    with pytest.raises(ConfigError, match="more than weights do"):
        files.read(write_npz(tmp_path / "w", zeros, np.savez_compressed))
    with pytest.raises(ConfigError, match="more than weights do"):
        files.read(write_pth(tmp_path / "w", zeros, compression=8))
    # The same zeros stored are no bomb.
    check(files.read(write_npz(tmp_path / "w", zeros)), zeros)


def test_entries_within_entries_are_refused(tmp_path):
    """Each would be read to its end: of many, the sum of their sizes is without bound."""
    path = write_npz(tmp_path / "w", {"a": np.zeros(99), "b": np.zeros(99)})
    files.read(path)
    data = bytearray(path.read_bytes())
    central = data.index(b"PK\x01\x02")
    for entry_start in (central, data.index(b"PK\x01\x02", central + 4)):
        data[entry_start + 20 : entry_start + 28] = struct.pack("<II", central - 100, central - 100)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="entries that overlap"):
        files.read(path)


def test_an_entry_that_lies_about_its_size_is_refused(tmp_path):
    path = write_npz(tmp_path / "w", {"w": np.zeros(1 << 16, np.float32)}, np.savez_compressed)
    data = bytearray(path.read_bytes())
    central = data.index(b"PK\x01\x02")
    for size in (100, 1 << 19):
        data[central + 24 : central + 28] = struct.pack("<I", size)
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="damaged or cut short"):
            files.read(path)
