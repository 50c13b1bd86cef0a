"""The `data.pkl` of a PyTorch checkpoint, without PyTorch and without running anything in it.

A pickle is a program for a stack machine whose instructions may import and call anything. This
machine has no instruction that imports, calls or sets an attribute: a global is looked up in
`_GLOBALS`, whose few entries build plain descriptions, and every other name is refused. Only the
instructions that `torch.save` writes are known. Containers come back as dict, list and tuple,
tensors as `Tensor` (where their numbers lie), and whatever else a checkpoint commonly holds beside
its weights as `Inert`.

Sources: CPython `Lib/pickletools.py` (the instructions); pytorch/pytorch: torch/_utils.py
(`_rebuild_tensor_v2`, `_rebuild_parameter`), torch/serialization.py (`persistent_id`).
"""

import dataclasses
import math
import pickletools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from cropr_jax.errors import ConfigError

# Bounds on memory: a checkpoint of 10,000 tensors takes 1.5 MB and half a million instructions.
MAX_BYTES = 64 << 20
MAX_INSTRUCTIONS = 4_000_000
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
class _Global:
    """A name from `_GLOBALS` or `STORAGES` on the stack."""

    name: str


def shown(text: str) -> str:
    """Text from a file, quoted, escaped and cut short for a message."""
    return ascii(text if len(text) <= 80 else text[:77] + "...")


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


_GLOBALS: dict[str, Callable[[tuple], Any]] = {
    "collections.OrderedDict": _ordered,
    "torch.Size": _size,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_tensor_v2": _tensor,
    **{name: lambda args, name=name: Inert(name) for name in _INERT},
}


def _global(name: str) -> _Global:
    if name in _GLOBALS or name in STORAGES:
        return _Global(name)
    if name.startswith("torch._utils._rebuild_") or name.endswith("Storage"):
        raise ConfigError(
            f"it holds a tensor of {shown(name)}; only dense tensors of real numbers are read, no "
            "complex, quantised or sparse ones and no 8-bit floats"
        )
    raise ConfigError(
        f"it asks for {shown(name)}, which is neither a tensor nor a plain container; nothing in "
        "it was run. If you trust the file, load it with PyTorch and save state_dict() alone"
    )


def _storage(pid: Any) -> Storage:
    """The storage of a persistent id ('storage', class, key, device, count)."""
    match pid:
        case ("storage", _Global(name=name), str(key), str(), int(numel)) if name in STORAGES:
            if _counts((numel,)):
                return Storage(STORAGES[name], key, numel)
    raise ConfigError("it describes a storage in a way that PyTorch never does")


class _Machine:
    """Stack, marks and memo of one pickle."""

    def __init__(self):
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """Carries out instructions, which go by their names in `pickletools`, and returns the top.

        Raises:
          ConfigError: on what no PyTorch checkpoint holds.
          IndexError, KeyError, ValueError: if the stack, an argument or the end is missing.
        """
        push, pop = self.stack.append, self.stack.pop
        instructions: Iterator[tuple[Any, Any, Any]] = pickletools.genops(data)
        for count, (opcode, arg, _) in enumerate(instructions):
            if count > MAX_INSTRUCTIONS:
                raise ConfigError(f"its pickle has more than {MAX_INSTRUCTIONS} instructions")
            match opcode.name:
                case "BINPUT" | "LONG_BINPUT":
                    self.memo[arg] = self.stack[-1]
                case "MEMOIZE":
                    self.memo[len(self.memo)] = self.stack[-1]
                case "BINGET" | "LONG_BINGET":
                    push(self.memo[arg])
                case "BININT1" | "BININT2" | "BININT" | "LONG1" | "LONG4":
                    # Longer ones could be chosen so that all collide as keys of a dict.
                    if arg.bit_length() > 64:
                        raise ConfigError(f"it holds an integer of {arg.bit_length()} bits")
                    push(arg)
                case "SHORT_BINUNICODE" | "BINUNICODE" | "BINUNICODE8" | "BINFLOAT":
                    push(arg)
                case "SHORT_BINBYTES" | "BINBYTES" | "BINBYTES8":
                    push(arg)
                case "NEWTRUE" | "NEWFALSE":
                    push(opcode.name == "NEWTRUE")
                case "NONE":
                    push(None)
                case "MARK":
                    self.marks.append(len(self.stack))
                case "EMPTY_TUPLE":
                    push(())
                case "TUPLE1":
                    push((pop(),))
                case "TUPLE2":
                    push((pop(-2), pop()))
                case "TUPLE3":
                    push((pop(-3), pop(-2), pop()))
                case "TUPLE":
                    push(tuple(self.pop_to_mark()))
                case "EMPTY_LIST":
                    push([])
                case "EMPTY_DICT":
                    push({})
                case "EMPTY_SET":
                    push(Inert("builtins.set"))
                case "APPEND":
                    self.add(list, [pop()])
                case "APPENDS":
                    self.add(list, self.pop_to_mark())
                case "ADDITEMS":
                    self.add(Inert, self.pop_to_mark())
                case "SETITEM":
                    self.add(dict, [pop(-2), pop()])
                case "SETITEMS":
                    self.add(dict, self.pop_to_mark())
                case "BINPERSID":
                    push(_storage(pop()))
                case "GLOBAL":
                    push(_global(arg.replace(" ", ".", 1)))
                case "STACK_GLOBAL":
                    match pop(-2), pop():
                        case str(module), str(name):
                            push(_global(f"{module}.{name}"))
                        case _:
                            raise ConfigError("it asks for a name that is no text")
                case "REDUCE" | "NEWOBJ":
                    args = pop()
                    push(self.built(opcode.name, pop(), args))
                case "BUILD":
                    # The state of an inert object or the `_metadata` of a state_dict: not kept.
                    pop()
                    if not isinstance(self.stack[-1], Inert | dict):
                        raise ConfigError(f"it sets the state of a {type(self.stack[-1]).__name__}")
                case "PROTO" | "FRAME" | "STOP":
                    pass
                case _:
                    raise ConfigError(
                        f"it holds the instruction {opcode.name}, which PyTorch never writes"
                    )
        return pop()

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def add(self, kind: type, items: list[Any]) -> None:
        """Puts items into the container on top, which must be of `kind`."""
        target = self.stack[-1]
        if type(target) is not kind:
            raise ConfigError(f"it puts items of a {kind.__name__} into a {type(target).__name__}")
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, dict):
            keys = items[::2]
            # Scalars alone: hashing a tuple nested a million times would exhaust the C stack.
            if not all(isinstance(key, str | int | float | None) for key in keys):
                raise ConfigError("it has a key of a dict that is neither text nor number")
            target.update(zip(keys, items[1::2], strict=True))

    def built(self, opcode: str, function: Any, args: Any) -> Any:
        """What a call with `args` describes, if `function` is a name that we know."""
        name = function.name if isinstance(function, _Global) else type(function).__name__
        if name not in _GLOBALS or type(args) is not tuple:
            raise ConfigError(f"it calls {shown(name)} by {opcode}, which PyTorch never writes")
        return _GLOBALS[name](args)


def loads(data: bytes) -> Any:
    """What a pickle of `torch.save` describes; no code of it is run.

    Args:
      data: content of `data.pkl`.

    Returns:
      dict, list, tuple, text, bytes and numbers, with `Tensor` and `Inert` leaves. Containers
      may be shared or nested without bound: walk them with care.

    Raises:
      ConfigError: on any name, instruction or shape that is not expected, and on a pickle that is
        cut short, damaged or too large. The message does not name the file.
    """
    if len(data) > MAX_BYTES:
        raise ConfigError(f"its pickle has more than {MAX_BYTES} bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # pickletools decodes escapes in names
            return _Machine().run(data)
    except ConfigError:
        raise
    except (IndexError, KeyError, ValueError, Warning) as error:
        # An empty stack, an unknown memo entry, an argument that is cut short or no UTF-8.
        raise ConfigError(f"its pickle is cut short or damaged ({error})") from error
