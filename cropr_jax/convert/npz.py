"""NumPy's `.npz`: a zip archive of `.npy` arrays, of which nothing is ever unpickled.

Source of the layout: numpy/numpy: numpy/lib/_format_impl.py.
"""

import math
import re

import numpy as np

from cropr_jax.convert.archives import TYPES, Archive, swapped, view
from cropr_jax.convert.messages import shown
from cropr_jax.errors import ConfigError

# NumPy's codes without the byte order. bfloat16 is unknown to `.npy`, which calls it V2.
NPY_TYPES = {dtype.str[1:]: dtype for dtype in TYPES.values()}
NPY_HEADER = re.compile(
    rb"\s*\{\s*'descr':\s*'([<>=|]?)(\w+)',\s*'fortran_order':\s*(True|False),"
    rb"\s*'shape':\s*\(((?:\d{1,18}L?(?:, ?|(?=\))))*)\),?\s*\}\s*"
)
MAX_HEADER = 10_000  # bytes


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
    shape = tuple(int(size) for size in re.findall(r"\d+", sizes))
    numbers = content[start + length :]
    if len(numbers) != math.prod(shape) * dtype.itemsize:
        raise ConfigError(
            f"its entry {shown(name)} of shape {shape} and type {dtype} has {len(numbers)} bytes"
        )
    if order == ">" and dtype.itemsize > 1:
        numbers = swapped(numbers, dtype)
    if fortran == "True":
        return view(numbers, dtype, shape[::-1]).T
    return view(numbers, dtype, shape)
