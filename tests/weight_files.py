"""Files of weights for tests: `.pth` written without PyTorch, and damage of every kind."""

import codecs
import contextlib
import dataclasses
import io
import itertools
import struct
import sys
import zipfile

import ml_dtypes
import numpy as np

from cropr_jax.convert import files

STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}


@dataclasses.dataclass(frozen=True)
class Name:
    """A global: `GLOBAL module name`."""

    module: str
    name: str


@dataclasses.dataclass(frozen=True)
class Call:
    """A global called: `REDUCE`."""

    name: Name
    args: tuple


@dataclasses.dataclass(frozen=True)
class Persistent:
    """What PyTorch calls a persistent id: `BINPERSID`."""

    pid: object


@dataclasses.dataclass(frozen=True)
class Raw:
    """Instructions as they are."""

    code: bytes


def encode(value) -> bytes:
    """Instructions of protocol 2 that push a value."""
    match value:
        case Raw(code):
            return code
        case Name(module, name):
            return b"c" + f"{module}\n{name}\n".encode()
        case Call(name, args):
            return encode(name) + encode(args) + b"R"
        case Persistent(pid):
            return encode(pid) + b"Q"
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(data)]) + data
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            data = value.encode()
            return b"X" + struct.pack("<I", len(data)) + data
        case tuple():
            return b"(" + b"".join(map(encode, value)) + b"t"
        case list():
            return b"](" + b"".join(map(encode, value)) + b"e"
        case dict():
            items = (encode(key) + encode(item) for key, item in value.items())
            return b"}(" + b"".join(items) + b"u"
    raise TypeError(value)


def pickled(value) -> bytes:
    return b"\x80\x02" + encode(value) + b"."


def tensor(key="0", kind="FloatStorage", numel=6, offset=0, size=(2, 3), stride=(3, 1), extra=()):
    """A tensor as `torch.save` writes it."""
    storage = Persistent(("storage", Name("torch", kind), key, "cpu", numel))
    hooks = Call(Name("collections", "OrderedDict"), ())
    args = (storage, offset, size, stride, False, hooks, *extra)
    return Call(Name("torch._utils", "_rebuild_tensor_v2"), args)


def dense(arrays):
    """A dict of dense tensors, each in its own storage, and the storages."""
    tree, storages = {}, {}
    for i, (name, array) in enumerate(arrays.items()):
        kind = STORAGES[array.dtype.name]
        steps = tuple(step // array.itemsize for step in np.empty(array.shape, array.dtype).strides)
        tree[name] = tensor(str(i), kind, array.size, 0, array.shape, steps)
        storages[str(i)] = array.tobytes()
    return tree, storages


def pth_bytes(tree, storages, *, root="archive/", byteorder=b"little", compression=0, entries=()):
    """A zip archive as `torch.save` writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr(f"{root}data.pkl", tree if isinstance(tree, bytes) else pickled(tree))
        archive.writestr(f"{root}byteorder", byteorder)
        for key, data in storages.items():
            archive.writestr(f"{root}data/{key}", data)
        for name, data in entries:
            archive.writestr(name, data)
        archive.writestr(f"{root}version", b"3\n")
    return buffer.getvalue()


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Data with flipped, lost, repeated, moved or foreign bytes."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        if not data:
            return b""
        start, stop = sorted(rng.integers(0, len(data) + 1, 2))
        few = min(stop, start + int(rng.integers(1, 9)))
        match rng.integers(0, 8):
            case 0 | 1 | 2:
                at = rng.integers(0, len(data))
                data[at] ^= 1 << rng.integers(0, 8)
            case 3:
                data[start:few] = rng.bytes(few - start)
            case 4:
                del data[start:]
            case 5:
                del data[start:few]
            case 6:
                data[start:start] = data[start:stop][:64]
            case 7:
                value = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF]))
                data[start:few] = bytes([value]) * (few - start)
    return bytes(data)


def damaged_inside(data: bytes, rng: np.random.Generator) -> bytes:
    """A zip archive with one entry damaged and its sum right, or with two entries swapped."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = [(info, archive.read(info)) for info in archive.infolist()]
    names = [info.filename for info, _ in entries]
    contents = [content for _, content in entries]
    # Half of the time the entry that says what the others mean.
    hit = 0 if rng.random() < 0.5 else int(rng.integers(len(entries)))
    if rng.random() < 0.1:
        other = int(rng.integers(len(entries)))
        contents[hit], contents[other] = contents[other], contents[hit]
    else:
        contents[hit] = damaged(contents[hit], rng)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", entries[0][0].compress_type) as archive:
        for name, content in zip(names, contents, strict=True):
            archive.writestr(name, content)
    return buffer.getvalue()


def safetensors_inside(data: bytes, rng: np.random.Generator) -> bytes:
    """A safetensors file with a damaged header of the right length."""
    length = int.from_bytes(data[:8], "little")
    header = damaged(data[8 : 8 + length], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


BFLOAT16 = ml_dtypes.bfloat16
TYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "?", BFLOAT16]
SHAPES = [(), (0,), (1,), (3, 0, 2), (5,), (2, 3), (2, 3, 4)]


def arrays_of(dtypes=TYPES, shapes=SHAPES):
    """An array of every type and shape, with values that none of them rounds."""
    found = {}
    for dtype, shape in itertools.product(dtypes, shapes):
        name = f"{np.dtype(dtype).name}.{'x'.join(map(str, shape))}"
        count = int(np.prod(shape))
        found[name] = (
            (np.arange(1, count + 1) % 2 if dtype == "?" else np.arange(count))
            .reshape(shape)
            .astype(dtype)
        )
    return found


def check(weights, expected):
    """Same names in the same order, types, shapes and numbers; nothing that could be written to."""
    assert list(weights.arrays) == list(expected)
    for name, array in expected.items():
        found = weights.arrays[name]
        assert found.dtype == array.dtype, name
        assert found.shape == array.shape, name
        assert found.tobytes() == array.tobytes(), name
        assert found.dtype.isnative


def write_npz(path, arrays, save=np.savez):
    buffer = io.BytesIO()
    save(buffer, **arrays)
    path.write_bytes(buffer.getvalue())
    return path


def write_pth(path, arrays, wrap=lambda tree: tree, **options):
    tree, storages = dense(arrays)
    path.write_bytes(pth_bytes(wrap(tree), storages, **options))
    return path


def write_safetensors(path, arrays, metadata=None):
    files.write_safetensors(path, arrays, metadata)
    return path


WRITERS = {
    "npz": write_npz,
    "npz compressed": lambda path, arrays: write_npz(path, arrays, np.savez_compressed),
    "pth": write_pth,
    "pth compressed": lambda path, arrays: write_pth(path, arrays, compression=8),
    "pth wrapped": lambda path, arrays: write_pth(path, arrays, lambda tree: {"model": tree}),
    "safetensors": write_safetensors,
}


def npy(header, data=b"", version=1):
    header = header.encode()
    length = struct.pack({1: "<H"}.get(version, "<I"), len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + data


def write_zip(path, entries, compression=0):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return path


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }"


# What the interpreter reports when it runs, imports or starts something.
_WATCHED = ("compile", "ctypes", "exec", "import", "os.", "pickle.find_class", "subprocess.")
_seen: list[str] | None = None


def _audit(event, args):
    if _seen is None:
        return
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if writes or event.startswith(_WATCHED):
        _seen.append(f"{event} {args!r:.200}")


# Codecs of text in archives and pickles are imported at their first use.
for _codec in ("ascii", "cp437", "latin-1", "raw-unicode-escape"):
    codecs.lookup(_codec)
sys.addaudithook(_audit)


@contextlib.contextmanager
def nothing_runs():
    """Fails if anything was run, imported, started or opened for writing."""
    global _seen
    _seen = seen = []
    try:
        yield
    finally:
        _seen = None
    assert not seen, seen
