"""What the pickle of a PyTorch checkpoint may name, and what is made of it: plain descriptions.

Nothing here imports or calls anything by a name from a file: a name is looked up in `GLOBALS`, and
every other one is refused.

Source: pytorch/pytorch: torch/_utils.py (`_rebuild_tensor_v2`, `_rebuild_parameter`),
torch/serialization.py (`persistent_id`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from cropr_jax.convert.messages import shown
from cropr_jax.errors import ConfigError

MAX_RANK = 32

# PyTorch's storage classes and what they hold.
STORAGES = {
    "torch.DoubleStorage": np.dtype("<f8"),
    "torch.FloatStorage": np.dtype("<f4"),
    "torch.HalfStorage": np.dtype("<f2"),
    "torch.BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch.LongStorage": np.dtype("<i8"),
    "torch.IntStorage": np.dtype("<i4"),
    "torch.ShortStorage": np.dtype("<i2"),
    "torch.CharStorage": np.dtype("i1"),
    "torch.ByteStorage": np.dtype("u1"),
    "torch.BoolStorage": np.dtype("?"),
}

# Known, of no use here, and kept as a name only.
_INERT = (
    "__builtin__.set",  # as Python 2 called it and protocol 2 still does
    "_codecs.encode",
    "argparse.Namespace",
    "builtins.set",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "pathlib.PosixPath",
    "torch.device",
)


@dataclasses.dataclass(frozen=True)
class Storage:
    """`numel` numbers of one type, in the archive's entry `data/<key>`."""

    dtype: np.dtype
    key: str
    numel: int


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A view of a storage; offset and strides count numbers. It lies within the storage."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Inert:
    """An object whose class is known and whose content was dropped."""

    name: str


@dataclasses.dataclass(frozen=True)
class Global:
    """A name from `GLOBALS` or `STORAGES` on the stack."""

    name: str


def _counts(value: Any) -> bool:
    """Whether `value` is a short tuple of counts, as sizes and strides are."""
    if type(value) is not tuple or len(value) > MAX_RANK:
        return False
    return all(type(n) is int and 0 <= n < 2**62 for n in value)


def _tensor(args: tuple) -> Tensor:
    """`_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks, metadata)`."""
    if len(args) not in (6, 7) or not isinstance(args[0], Storage):
        raise ConfigError("it describes a tensor in a way that PyTorch never does")
    storage, offset, size, stride = args[:4]
    if not (_counts((offset,)) and _counts(size) and _counts(stride)):
        raise ConfigError("it holds a tensor whose offset, size or stride are no counts")
    if len(size) != len(stride):
        raise ConfigError(f"it holds a tensor of {len(size)} sizes and {len(stride)} strides")
    if len(args) == 7 and args[6]:
        raise ConfigError(
            "it holds a lazy conjugate or negative; save tensor.resolve_conj().resolve_neg()"
        )
    count = math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    # More numbers than the storage holds is an expanded tensor: a few bytes that would fill memory.
    if count and (last >= storage.numel or count > storage.numel):
        raise ConfigError(
            f"it holds a tensor of size {size}, stride {stride} and offset {offset} in storage "
            f"{shown(storage.key)}, which has {storage.numel} numbers only"
        )
    return Tensor(storage, offset if count else 0, size, stride)


def _parameter(args: tuple) -> Tensor:
    """`_rebuild_parameter(data, requires_grad, hooks)`."""
    if len(args) != 3 or not isinstance(args[0], Tensor):
        raise ConfigError("it describes a parameter in a way that PyTorch never does")
    return args[0]


def _ordered(args: tuple) -> dict:
    """`OrderedDict()`, filled by later instructions."""
    if args:
        raise ConfigError("it describes an OrderedDict in a way that Python 3 never does")
    return {}


def _size(args: tuple) -> tuple[int, ...]:
    """`torch.Size(tuple)`."""
    if len(args) != 1 or not _counts(args[0]):
        raise ConfigError("it describes a torch.Size that is no tuple of counts")
    return args[0]


GLOBALS: dict[str, Callable[[tuple], Any]] = {
    "collections.OrderedDict": _ordered,
    "torch.Size": _size,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_tensor_v2": _tensor,
    **{name: lambda args, name=name: Inert(name) for name in _INERT},
}


def look_up(name: str) -> Global:
    if name in GLOBALS or name in STORAGES:
        return Global(name)
    if name.startswith("torch._utils._rebuild_") or name.endswith("Storage"):
        raise ConfigError(
            f"it holds a tensor of {shown(name)}; only dense tensors of real numbers are read, no "
            "complex, quantised or sparse ones and no 8-bit floats"
        )
    raise ConfigError(
        f"it asks for {shown(name)}, which is neither a tensor nor a plain container; nothing in "
        "it was run. If you trust the file, load it with PyTorch and save state_dict() alone"
    )


def storage(pid: Any) -> Storage:
    """The storage of a persistent id ('storage', class, key, device, count)."""
    match pid:
        case ("storage", Global(name=name), str(key), str(), int(numel)) if name in STORAGES:
            if _counts((numel,)):
                return Storage(STORAGES[name], key, numel)
    raise ConfigError("it describes a storage in a way that PyTorch never does")
