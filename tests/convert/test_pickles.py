"""Pickles of PyTorch checkpoints: what is read, and that nothing in them runs."""

import argparse
import collections
import contextlib
import os
import pickle
import re
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from weight_files import Call, Name, Persistent, Raw, damaged, encode, nothing_runs, pickled, tensor

from cropr_jax.convert import pickles
from cropr_jax.convert.torch_objects import Inert, Storage, Tensor
from cropr_jax.errors import ConfigError

FLOATS = Storage(np.dtype("<f4"), "0", 6)
PLAIN = {
    "text": "é" * 300,
    "short": "a",
    "numbers": [0, 255, 65535, -1, 2**31, -(2**40), 2**63, 1.5, float("inf")],
    "none": None,
    "flags": (True, False),
    "nested": {1: {2: [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]}, -1.5: {}, None: 0, False: []},
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_containers_come_back(protocol):
    assert pickles.loads(pickle.dumps(PLAIN, protocol)) == PLAIN


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_a_checkpoint_holds_beside_weights_is_inert(protocol):
    shared = ["x"]
    ordered = collections.OrderedDict(a=1, b=shared)
    ordered._metadata = collections.OrderedDict(version=1)
    tree = {
        "args": argparse.Namespace(lr=1e-3, betas=(0.9, 0.95)),
        "best": np.float64(81.5),
        "tags": {1, 2},
        "ordered": ordered,
        "shared": shared,
    }
    loaded = pickles.loads(pickle.dumps(tree, protocol))
    assert loaded["args"] == Inert("argparse.Namespace")
    assert loaded["best"].name.endswith("multiarray.scalar")
    assert loaded["tags"].name.endswith(".set")
    assert loaded["ordered"] == {"a": 1, "b": ["x"]}
    assert loaded["ordered"]["b"] is loaded["shared"]


def test_bytes_need_protocol_three():
    assert pickles.loads(pickle.dumps(b"\xff" * 300, 3)) == b"\xff" * 300
    assert pickles.loads(pickle.dumps(b"\xff", 2)) == Inert("_codecs.encode")


def test_tensors_are_described():
    parameter = Call(Name("torch._utils", "_rebuild_parameter"), (tensor(), True, {}))
    tree = {
        "dense": tensor(),
        "transposed": tensor(size=(3, 2), stride=(1, 3)),
        "part": tensor(offset=2, size=(2,), stride=(3,)),
        "scalar": tensor(offset=5, size=(), stride=()),
        "empty": tensor(size=(0, 3), stride=(3, 1), offset=9),
        "metadata": tensor(extra=({},)),
        "parameter": parameter,
        "half": tensor("h", "BFloat16Storage", 1, 0, (1,), (1,)),
    }
    loaded = pickles.loads(pickled(tree))
    assert loaded == {
        "dense": Tensor(FLOATS, 0, (2, 3), (3, 1)),
        "transposed": Tensor(FLOATS, 0, (3, 2), (1, 3)),
        "part": Tensor(FLOATS, 2, (2,), (3,)),
        "scalar": Tensor(FLOATS, 5, (), ()),
        "empty": Tensor(FLOATS, 0, (0, 3), (3, 1)),
        "metadata": Tensor(FLOATS, 0, (2, 3), (3, 1)),
        "parameter": Tensor(FLOATS, 0, (2, 3), (3, 1)),
        "half": Tensor(Storage(np.dtype(ml_dtypes.bfloat16), "h", 1), 0, (1,), (1,)),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 1}, "6 numbers only"),
        ({"offset": -1}, "no counts"),
        ({"offset": True}, "no counts"),
        ({"stride": (4, 1)}, "6 numbers only"),
        ({"stride": (-3, 1)}, "no counts"),
        ({"size": (2, 4)}, "6 numbers only"),
        ({"size": (2**61, 2**61)}, "6 numbers only"),
        ({"size": (2**70, 0)}, "no counts|bits"),
        ({"size": (1000, 1), "stride": (0, 0)}, "6 numbers only"),
        ({"size": (2,)}, "1 sizes and 2 strides"),
        ({"size": [2, 3]}, "no counts"),
        ({"size": (1,) * 100, "stride": (1,) * 100}, "no counts"),
        ({"numel": -6}, "storage"),
        ({"numel": True}, "storage"),
        ({"numel": 6.0}, "storage"),
        ({"key": 0}, "storage"),
        ({"extra": ({"neg": True},)}, "conjugate or negative"),
        ({"extra": (None, None)}, "PyTorch never does"),
        ({"kind": "ComplexFloatStorage"}, "torch.ComplexFloatStorage"),
        ({"kind": "QInt8Storage"}, "torch.QInt8Storage"),
        ({"kind": "UntypedStorage"}, "torch.UntypedStorage"),
        ({"kind": "Size"}, "storage"),
    ],
)
def test_impossible_tensors_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        pickles.loads(pickled({"w": tensor(**changes)}))


class Evil:
    """Whatever `reduced` calls, at loading."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def hostile(path):
    """(pickle, what its message must name) of programs that would create `path`."""
    command = f"touch {path}"
    python = f"__import__('os').system({command!r})"
    for protocol in range(2, 6):
        yield pickle.dumps(Evil(os.system, (command,)), protocol), "posix.system|nt.system"
        yield pickle.dumps(Evil(eval, (python,)), protocol), "__builtin__.eval|builtins.eval"
        yield pickle.dumps({"model": Evil(exec, (python,))}, protocol), "exec"
        yield pickle.dumps(Evil(open, (str(path), "w")), protocol), "open"
    yield pickled(Call(Name("os", "system"), (command,))), "os.system"
    yield b"\x80\x04\x8c\x02os\x8c\x06system\x93" + encode((command,)) + b"R.", "os.system"
    yield b"(" + encode(command) + b"ios\nsystem\n.", "INST"
    yield b"(cos\nsystem\n" + encode(command) + b"o.", "os.system"
    yield b"(" + encode(Name("torch", "Size")) + encode(command) + b"o.", "OBJ"
    yield encode(Name("os", "system")) + encode((command,)) + b"\x81.", "os.system"
    yield encode(Name("subprocess", "Popen")) + encode((command,)) + b"}\x92.", "subprocess.Popen"
    yield encode(Name("argparse", "Namespace")) + encode(()) + b"}\x92.", "NEWOBJ_EX"
    yield b"\x82\x01" + encode((command,)) + b"R.", "EXT1"
    yield b"\x83\x01\x00.", "EXT2"
    yield b"\x84\x01\x00\x00\x00.", "EXT4"
    yield b"Pos.system\n.", "PERSID"
    yield encode(Persistent(command)) + b".", "storage"
    yield encode(Persistent(("storage", Name("torch", "Size"), "0", "cpu", 1))) + b".", "storage"
    # Methods and attributes of what is known.
    yield pickled(Call(Name("collections", "OrderedDict.__init__.__globals__"), ())), "__globals__"
    yield pickled(Call(Name("argparse", "_sys.modules"), ())), "_sys.modules"
    yield pickled(Call(Name("numpy", "load"), (str(path),))), "numpy.load"
    yield pickled(Call(Name("torch", "load"), (str(path),))), "torch.load"
    yield pickled(Call(Name("torch.hub", "load_state_dict_from_url"), ("x",))), "torch.hub"
    yield pickled(Call(Name("torch._utils", "_rebuild_device_tensor_from_numpy"), ())), "_rebuild"
    # Calls of what is no function, and states set on it.
    yield pickled(Raw(encode("os.system") + encode((command,)) + b"R")), "calls 'str' by REDUCE"
    yield pickled(Raw(encode(Name("torch", "FloatStorage")) + b")R")), "torch.FloatStorage"
    yield pickled(Raw(encode(Name("torch", "Size")) + b"]R")), "torch.Size"
    yield pickled(Raw(encode(Name("torch", "Size")) + b"}b")), "sets the state of a Global"
    yield pickled(Raw(encode(tensor()) + encode({"__class__": 1}) + b"b")), "state of a Tensor"
    yield pickled(Raw(encode("x") + encode({"__setstate__": command}) + b"b")), "state of a str"
    # Items put into what is no container.
    yield pickled(Raw(encode(tensor()) + b"Na")), "into a Tensor"
    yield pickled(Raw(encode({}) + b"(Ne")), "into a dict"
    yield pickled(Raw(encode([]) + b"NNs")), "into a list"
    yield pickled(Raw(encode([]) + b"(N\x90")), "into a list"
    # Stacks, marks and memos that are not there.
    for code in (b".", b"e.", b"u.", b"t.", b"s.", b"a.", b"R.", b"Q.", b"b.", b"\x93.", b"\x87."):
        yield code, "damaged"
    yield b"h\x05.", "damaged"
    yield b"(N", "damaged"
    yield b"}(Nu.", "damaged"
    yield b"", "damaged"
    yield b"N", "damaged"
    yield b"\xff", "damaged"
    yield encode(["x"])[:-3], "damaged"
    yield b"X\x01\x00\x00\x00\xff.", "damaged"
    yield b"cos\\q\nsystem\n.", "damaged"
    # Lengths and numbers that are not there.
    yield b"\x8e" + struct.pack("<Q", 2**62) + b"x.", "damaged"
    yield b"B\xff\xff\xff\xffx.", "damaged"
    yield b"\x8d" + struct.pack("<Q", 2**63) + b"x.", "damaged"
    yield b"\x96" + struct.pack("<Q", 2**40) + b"x.", "damaged"
    yield b"\x8b" + struct.pack("<i", 2**31 - 1) + b"x.", "damaged"
    yield b"\x8b" + struct.pack("<i", -5) + b"x.", "damaged"
    yield b"\x8b" + struct.pack("<i", 1000) + b"\x01" * 1000 + b".", "8000 bits|7993 bits"
    yield b"I" + b"9" * 10_000 + b"\n.", "damaged|INT"
    yield b"0.", "POP"
    yield b"N2.", "DUP"
    yield pickled(Raw(b"}" + encode(tensor()) + b"Ns")), "neither text nor number"
    yield pickled(Raw(b")N\x93")), "no text"


def test_the_programs_would_run_elsewhere(tmp_path):
    # Else the next test could not fail.
    first = next(hostile(tmp_path / "ran"))[0]
    pickle.loads(first)
    assert (tmp_path / "ran").exists()


def test_hostile_pickles_are_refused_by_name(tmp_path):
    path = tmp_path / "ran"
    for data, message in hostile(path):
        tracemalloc.start()
        with nothing_runs(), pytest.raises(ConfigError) as error:
            pickles.loads(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert re.search(message, str(error.value)), (data[:80], error.value)
        assert len(str(error.value)) < 500
        assert peak < 100e6
    assert not path.exists()


def test_huge_memo_numbers_cost_nothing():
    tracemalloc.start()
    assert pickles.loads(b"Nr\xff\xff\xff\xffj\xff\xff\xff\xff.") is None
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_nesting_without_bound_is_no_recursion():
    depth = 100_000
    nested = b")" + b"\x85" * depth
    assert len(pickles.loads(nested + b".")) == 1
    assert len(pickles.loads(b"]" * 10_000 + b"a" * 9_999 + b".")) == 1
    # As a key its hash, as a name its text would recur.
    with pytest.raises(ConfigError, match="neither text nor number"):
        pickles.loads(b"}" + nested + b"Ns.")
    with pytest.raises(ConfigError, match="no text"):
        pickles.loads(nested + b"N\x93.")


def test_lists_that_double_are_shared():
    # Thirty lists, each of the one before twice: a thousand million leaves if they were copied.
    code = b"]q\x00" + b"".join(b"]q%c(h%ch%ce" % (i, i - 1, i - 1) for i in range(1, 31))
    assert len(pickles.loads(code + b".")) == 2


def test_a_list_may_hold_itself():
    loop = []
    loop.append(loop)
    loaded = pickles.loads(pickle.dumps(loop, 2))
    assert loaded[0] is loaded


def test_size_is_bounded(monkeypatch):
    monkeypatch.setattr(pickles, "MAX_INSTRUCTIONS", 10)
    assert pickles.loads(b"N" * 10 + b".") is None
    with pytest.raises(ConfigError, match="more than 10 instructions"):
        pickles.loads(b"N" * 11 + b".")
    monkeypatch.setattr(pickles, "MAX_BYTES", 10)
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        pickles.loads(b"N" * 11 + b".")


def test_damaged_pickles_load_or_are_refused():
    tree = {"model": {"w": tensor(), "n": 1}, "args": Call(Name("argparse", "Namespace"), ())}
    seeds = [pickled(tree)] + [pickle.dumps(PLAIN, protocol) for protocol in (2, 3, 4, 5)]
    rng = np.random.default_rng(0)
    refused = 0
    for i in range(2000):
        data = damaged(seeds[i % len(seeds)], rng)
        with nothing_runs():
            try:
                pickles.loads(data)
            except ConfigError:
                refused += 1
    assert 500 < refused < 2000


@pytest.mark.parametrize("length", [1, 2, 5, 20, 100])
def test_random_programs_load_or_are_refused(length):
    # Of known instructions without arguments, so that more of them go on for a while.
    alphabet = np.frombuffer(b"N)]}\x88\x85\x86\x87(taebsuRQ\x81\x93\x94\x8f\x90", np.uint8)
    rng = np.random.default_rng(length)
    prefix = encode(tensor()) + encode(Name("torch", "Size")) + encode({"a": []})
    for _ in range(200):
        data = prefix + rng.choice(alphabet, length).tobytes() + b"."
        with nothing_runs(), contextlib.suppress(ConfigError):
            pickles.loads(data)
