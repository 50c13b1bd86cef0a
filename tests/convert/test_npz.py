"""NumPy's `.npz`: plain arrays of every kind, and nothing else."""

import numpy as np
import pytest
from weight_files import (
    GOOD,
    check,
    nothing_runs,
    npy,
    write_npz,
    write_zip,
)

from cropr_jax.convert import files
from cropr_jax.errors import ConfigError


def test_npz_in_fortran_order_and_big_endian(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    stored = {"f": np.asfortranarray(array), "big": array.astype(">f4"), "byte": np.ones(2, ">u1")}
    weights = files.read(write_npz(tmp_path / "w", stored))
    check(weights, {"f": array, "big": array, "byte": np.ones(2, np.uint8)})


def test_npy_headers_of_other_writers(tmp_path):
    entries = [
        ("a.npy", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2L,), }", bytes(8))),
        ("b.npy", npy("{'descr':'=f4','fortran_order':False,'shape':(1,2)} \n", bytes(8), 2)),
    ]
    weights = files.read(write_zip(tmp_path / "w", entries))
    assert {name: array.shape for name, array in weights.arrays.items()} == {"a": (2,), "b": (1, 2)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"\x80N."), "unpickled"),
        (npy("{'descr': '<c8', 'fortran_order': False, 'shape': (1,), }", bytes(8)), "'<c8'"),
        (npy("{'descr': '<U3', 'fortran_order': False, 'shape': (1,), }", bytes(12)), "'<U3'"),
        (npy("{'descr': '<f16', 'fortran_order': False, 'shape': (1,), }", bytes(16)), "'<f16'"),
        (npy("{'descr': '<M8[s]', 'fortran_order': False, 'shape': (1,), }", bytes(8)), "header"),
        (npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }"), "header"),
        (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", bytes(8)), "has 8 bytes"),
        (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", bytes(8)), "has 8 bytes"),
        (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }", bytes(8)), "header"),
        (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1 2), }", bytes(8)), "header"),
        (npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'9' * 5000}), }}"), "header"),
        (npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'1, ' * 99}), }}"), "has 0"),
        (npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'0, ' * 99}), }}"), "shape"),
        (npy("__import__('os').system('true')"), "header"),
        (npy("{'descr': '<f4'" + " " * 70_000, version=2), "header"),
        (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }", bytes(4), 3), "format 1"),
        (b"\x93NUMPY", "format 1"),
        (b"", "format 1"),
        (b"\x93NUMPY\x01\x00\xff\xff{", "header"),
    ],
)
def test_npz_of_anything_but_numbers_is_refused(tmp_path, content, message):
    path = write_zip(tmp_path / "w.npz", [("good.npy", npy(GOOD, bytes(4))), ("w.npy", content)])
    with nothing_runs(), pytest.raises(ConfigError, match=message) as error:
        files.read(path)
    assert str(path) in str(error.value)


def test_npz_with_other_entries_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'photo.jpg'.*expected one of .npy"):
        files.read(write_zip(tmp_path / "w", [("a.npy", npy(GOOD, bytes(4))), ("photo.jpg", b"")]))
