"""Files of weights: three formats by their content, damage, and what they cost."""

import io
import itertools
import json
import os
import struct
import subprocess
import sys
import time
import tracemalloc
import types
import warnings
import zipfile
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from weight_files import (
    Call,
    Name,
    damaged,
    damaged_inside,
    dense,
    nothing_runs,
    pickled,
    pth_bytes,
    safetensors_inside,
    tensor,
)

from cropr_jax.convert import archives, files
from cropr_jax.errors import ConfigError

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


@pytest.mark.parametrize("writer", WRITERS)
def test_round_trip_of_every_type_and_shape(tmp_path, writer):
    expected = arrays_of()
    # The suffix says nothing.
    weights = files.read(WRITERS[writer](tmp_path / "weights.bin", expected))
    assert weights.format == writer.split()[0]
    assert weights.wrapper == ("model" if writer == "pth wrapped" else "")
    if weights.format == "safetensors":  # which sorts by type
        expected = {name: expected[name] for name in weights.arrays}
    check(weights, expected)
    weights.release()
    check(weights, expected)


@pytest.mark.parametrize("writer", ["npz", "pth", "safetensors"])
def test_stored_arrays_are_mapped_and_read_only(tmp_path, writer):
    path = WRITERS[writer](tmp_path / "weights", {"w": np.zeros((8 << 20) // 4, np.float32)})
    files.read(path)
    tracemalloc.start()
    weights = files.read(path)
    files.check_finite("w", weights.arrays["w"])
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()
    with pytest.raises(ValueError, match="read-only"):
        weights.arrays["w"][0] = 1


def resident():
    """Bytes of memory that the process holds now, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_release_gives_memory_back(tmp_path):
    path = write_pth(tmp_path / "w", {"w": np.ones(8 << 20, np.float32)})
    weights = files.read(path)
    before = resident()
    files.check_finite("w", weights.arrays["w"])
    assert resident() - before > 24 << 20
    weights.release()
    assert resident() - before < 8 << 20
    assert weights.arrays["w"].all()


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["npz", "pth", "safetensors"])
def test_ten_thousand_arrays(tmp_path, writer):
    one = np.ones(3, np.float32)
    path = WRITERS[writer](tmp_path / "w", {f"blocks.{i}.weight": one for i in range(10_000)})
    start = time.process_time()
    assert len(files.read(path).arrays) == 10_000
    assert time.process_time() - start < 60


# npz


def test_npz_in_fortran_order_and_big_endian(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    stored = {"f": np.asfortranarray(array), "big": array.astype(">f4"), "byte": np.ones(2, ">u1")}
    weights = files.read(write_npz(tmp_path / "w", stored))
    check(weights, {"f": array, "big": array, "byte": np.ones(2, np.uint8)})


def npy(header, data=b"", version=1):
    header = header.encode()
    length = struct.pack({1: "<H"}.get(version, "<I"), len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + data


def write_zip(path, entries, compression=0):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return path


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


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }"


def test_npz_with_other_entries_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'photo.jpg'.*expected one of .npy"):
        files.read(write_zip(tmp_path / "w", [("a.npy", npy(GOOD, bytes(4))), ("photo.jpg", b"")]))


# pth


def test_pth_views_share_their_storage(tmp_path):
    numbers = np.arange(12, dtype=np.float32)
    tree = {
        "dense": tensor(numel=12, size=(3, 4), stride=(4, 1)),
        "tied": tensor(numel=12, size=(3, 4), stride=(4, 1)),
        "transposed": tensor(numel=12, size=(4, 3), stride=(1, 4)),
        "part": tensor(numel=12, offset=5, size=(3,), stride=(2,)),
        "last": tensor(numel=12, offset=11, size=(), stride=()),
    }
    path = tmp_path / "w"
    path.write_bytes(pth_bytes(tree, {"0": numbers.tobytes()}, root=""))
    weights = files.read(path)
    table = numbers.reshape(3, 4)
    expected = [table, table, table.T, numbers[5:11:2], numbers[11]]
    check(weights, dict(zip(tree, expected, strict=True)))
    assert np.shares_memory(weights.arrays["dense"], weights.arrays["tied"])
    assert np.shares_memory(weights.arrays["dense"], weights.arrays["transposed"])


def test_pth_of_big_endian_numbers(tmp_path):
    expected = arrays_of([dtype for dtype in TYPES if dtype != BFLOAT16])
    tree, storages = dense(expected)
    for key, array in zip(storages, expected.values(), strict=True):
        storages[key] = array.astype(array.dtype.newbyteorder(">")).tobytes()
    half = np.array([1.5, -2], BFLOAT16)
    tree["half"] = tensor("half", "BFloat16Storage", 2, 0, (2,), (1,))
    storages["half"] = half.view(np.uint16).byteswap().tobytes()
    path = tmp_path / "w"
    path.write_bytes(pth_bytes(tree, storages, byteorder=b"big"))
    check(files.read(path), {**expected, "half": half})


@pytest.mark.parametrize(
    ("present", "key", "wrapper"),
    [
        (["model"], None, "model"),
        (["state_dict_ema", "state_dict", "model_ema", "module", "model"], None, "model"),
        (["state_dict_ema", "state_dict", "model_ema", "module"], None, "module"),
        (["state_dict_ema", "state_dict", "model_ema"], None, "model_ema"),
        (["state_dict_ema", "state_dict"], None, "state_dict"),
        (["state_dict_ema"], None, "state_dict_ema"),
        (["model", "model_ema"], "model_ema", "model_ema"),
        (["model", "teacher"], "teacher", "teacher"),
    ],
)
def test_pth_wrappers_are_tried_in_order(tmp_path, present, key, wrapper):
    tree = {
        name: {"w": tensor(str(i), numel=1, size=(1,), stride=(1,))}
        for i, name in enumerate(present)
    }
    storages = {str(i): struct.pack("<f", i) for i in range(len(present))}
    tree.update(epoch=3, args=Call(Name("argparse", "Namespace"), ()), optimizer={"state": {}})
    path = tmp_path / "w"
    path.write_bytes(pth_bytes(tree, storages))
    weights = files.read(path, key=key)
    assert weights.wrapper == wrapper
    assert weights.arrays["w"].item() == present.index(wrapper)


ONE = tensor(numel=1, size=(1,), stride=(1,))


@pytest.mark.parametrize(
    ("tree", "key", "message"),
    [
        ([ONE], None, "it holds a list; expected a dict"),
        (ONE, None, "it holds a Tensor"),
        ({}, None, "no arrays"),
        ({"model": {}}, None, "no arrays"),
        ({"w": ONE, "epoch": 3}, None, "it holds the int 'epoch'.*out of 'w', 'epoch'"),
        ({"model": {"w": ONE, "n": None}}, None, "under 'model' it holds the NoneType 'n'"),
        ({"model": {"w": {"x": ONE}}}, None, "under 'model' it holds the dict 'w'"),
        ({"model": {0: ONE}}, None, "the Tensor '0'"),
        ({"model": {"w": ONE}}, "ema", "no dict under key='ema'; it holds 'model'"),
        ({"model": {"w": ONE}, "epoch": 1}, "epoch", "no dict under key='epoch'"),
        ({"model": {"a\nb": ONE}}, None, "no plain text"),
        ({"model": {"": ONE}}, None, "no plain text"),
    ],
)
def test_pth_without_a_dict_of_tensors_is_refused(tmp_path, tree, key, message):
    path = tmp_path / "w.pth"
    path.write_bytes(pth_bytes(tree, {"0": bytes(4)}))
    with pytest.raises(ConfigError, match=message):
        files.read(path, key=key)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storages": {}}, "lacks the entry 'archive/data/0'"),
        ({"storages": {"0": bytes(3)}}, "has 3 bytes; expected 1 numbers of float32"),
        ({"storages": {"0": bytes(8)}}, "has 8 bytes"),
        ({"byteorder": b"middle"}, "byteorder is b'middle'"),
        ({"entries": [("other/data.pkl", b"")]}, "2 files data.pkl"),
        ({"entries": [("archive/constants.pkl", b"")]}, "TorchScript"),
        ({"compression": zipfile.ZIP_BZIP2}, "method 12"),
        ({"tree": pickled(Call(Name("os", "system"), ("true",)))}, "asks for 'os.system'"),
    ],
)
def test_pth_of_another_make_is_refused(tmp_path, options, message):
    path = tmp_path / "w.pth"
    options = {"tree": {"w": ONE}, "storages": {"0": bytes(4)}, **options}
    path.write_bytes(pth_bytes(**options))
    with nothing_runs(), pytest.raises(ConfigError, match=message) as error:
        files.read(path)
    assert str(path) in str(error.value)


def test_storages_of_what_is_left_out_are_not_read(tmp_path):
    tree = {"model": {"w": ONE}, "optimizer": {"m": tensor("gone")}}
    path = tmp_path / "w"
    path.write_bytes(pth_bytes(tree, {"0": bytes(4)}))
    assert list(files.read(path).arrays) == ["w"]


# Archives


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


def test_an_entry_that_lies_about_its_size_is_refused(tmp_path):
    path = write_npz(tmp_path / "w", {"w": np.zeros(1 << 16, np.float32)}, np.savez_compressed)
    data = bytearray(path.read_bytes())
    central = data.index(b"PK\x01\x02")
    for size in (100, 1 << 19):
        data[central + 24 : central + 28] = struct.pack("<I", size)
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="damaged or cut short"):
            files.read(path)


# safetensors


def test_safetensors_are_those_of_the_library(tmp_path):
    from safetensors.numpy import load_file, save_file

    arrays = {name: array for name, array in arrays_of().items() if array.dtype != BFLOAT16}
    arrays["transposed"] = np.arange(6.0).reshape(2, 3).T
    arrays["big"] = np.arange(3, dtype=">i4")
    files.write_safetensors(tmp_path / "ours", arrays, {"format": "cropr_jax", "note": "é"})
    weights = files.read(tmp_path / "ours")
    assert weights.metadata == {"format": "cropr_jax", "note": "é"}
    theirs = load_file(tmp_path / "ours")
    assert set(theirs) == set(weights.arrays) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(weights.arrays[name], array)
        np.testing.assert_array_equal(theirs[name], array)
    save_file(theirs, tmp_path / "theirs")
    check(files.read(tmp_path / "theirs"), {name: theirs[name] for name in weights.arrays})


def safetensors_bytes(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (safetensors_bytes({"w": entry()}, bytes(3)), "damaged or cut short"),
        (safetensors_bytes({"w": entry()}, bytes(5)), "damaged or cut short"),
        (safetensors_bytes({"w": entry(shape=(2,))}, bytes(4)), "damaged or cut short"),
        (safetensors_bytes({"w": entry(offsets=(4, 8))}, bytes(8)), "damaged or cut short"),
        (safetensors_bytes({"w": entry(), "x": entry()}, bytes(4)), "damaged or cut short"),
        (safetensors_bytes({"w": entry(shape=(2**63, 2))}, bytes(4)), "damaged or cut short"),
        (safetensors_bytes({"w": entry("F8_E4M3", (4,))}, bytes(4)), "of type F8_E4M3"),
        (safetensors_bytes({"w": entry("C64", offsets=(0, 8))}, bytes(8)), "of type C64"),
        (safetensors_bytes({"w": entry("F4", (8,))}, bytes(4)), "of type F4"),
        (safetensors_bytes({"w": entry("nonsense")}, bytes(4)), "damaged or cut short"),
        (safetensors_bytes({"w": 3}), "damaged or cut short"),
        (safetensors_bytes(b"{" * 10_000), "damaged or cut short"),
        (safetensors_bytes(b'{"\xff": 1}'), "damaged or cut short"),
        (safetensors_bytes(b"{}"), "no arrays"),
        (safetensors_bytes({"__metadata__": {"a": "b"}}), "no arrays"),
        (struct.pack("<Q", 2**30) + b"{}", "damaged or cut short"),
    ],
)
def test_safetensors_that_are_not_are_refused(tmp_path, content, message):
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        files.read(path)
    assert str(path) in str(error.value)


def test_writing_is_all_or_nothing(tmp_path):
    path = tmp_path / "w.safetensors"
    with pytest.raises(ConfigError, match="'b' is complex64, unknown to safetensors"):
        files.write_safetensors(path, {"a": np.ones(2), "b": np.ones(2, np.complex64)})
    with pytest.raises(ConfigError, match="cannot be written"):
        files.write_safetensors(tmp_path / "none" / "w", {"a": np.ones(2)})
    with pytest.raises(TypeError):
        files.write_safetensors(path, {"a": np.ones(2)}, {"a": b"no text"})
    assert not list(tmp_path.iterdir())
    files.write_safetensors(path, {"a": np.ones(2)})
    with pytest.raises(ConfigError, match="exists; remove it"):
        files.write_safetensors(path, {"a": np.zeros(2)})
    assert files.read(path).arrays["a"].tolist() == [1, 1]
    assert list(tmp_path.iterdir()) == [path]


# What is no file of weights


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.", "before 1.6; re-save it"),
        (bytes(257) + b"ustar\x00" + bytes(300), "tar archive.*re-save it"),
        (npy(GOOD, bytes(4)), "a single array"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        (b"<!DOCTYPE html>", "web page"),
        (b"\xff\xd8\xff\xe0JFIF", r"starts with b'\\xff\\xd8\\xff\\xe0JFIF'; expected a .npz"),
        (b"PK\x03\x04", "damaged or cut short"),
        (b"PK\x05\x06" + bytes(18), "no arrays"),
    ],
)
def test_other_content_is_named(tmp_path, content, message):
    path = tmp_path / "w.pth"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        files.read(path)
    assert str(path) in str(error.value)


def test_what_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(ConfigError, match="none': it does not exist"):
        files.read(tmp_path / "none")
    with pytest.raises(ConfigError, match="it is no file"):
        files.read(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        files.read("a\0b")
    with pytest.raises(ConfigError, match="does not exist"):
        files.read("~nobody_of_this_name/w")
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        files.read("a" * 10_000)
    path = write_npz(tmp_path / "w", {"w": np.ones(2)})
    with pytest.raises(ConfigError, match="key='model' was given, but a npz file"):
        files.read(path, key="model")


# Addresses


def test_addresses_by_fsspec(tmp_path):
    import fsspec

    with fsspec.open("memory://weights/w.npz", "wb") as file:
        file.write(write_npz(tmp_path / "w", {"w": np.arange(3)}).read_bytes())
    assert files.read("memory://weights/w.npz").arrays["w"].tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="'memory://none': the download failed .FileNotFound"):
        files.read("memory://none")
    with pytest.raises(ConfigError, match="'wrong://x': the download failed"):
        files.read("wrong://x")


def test_addresses_by_huggingface_hub(tmp_path, monkeypatch):
    path = write_npz(tmp_path / "w", {"w": np.arange(3)})
    calls = []

    def download(repository, file, revision):
        calls.append((repository, file, revision))
        return str(path)

    hub = types.SimpleNamespace(hf_hub_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert files.read("hf://timm/vit_tiny/model.safetensors").arrays["w"].tolist() == [0, 1, 2]
    files.read("hf://timm/vit_tiny@v1/sub/model.pth")
    assert calls == [
        ("timm/vit_tiny", "model.safetensors", None),
        ("timm/vit_tiny", "sub/model.pth", "v1"),
    ]


@pytest.mark.parametrize(
    ("address", "package"), [("hf://a/b/c", "huggingface_hub"), ("s3://a/b", "fsspec")]
)
def test_addresses_without_their_package(monkeypatch, address, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"{address}.*needs the package {package}: pip install"):
        files.read(address)


# Numbers


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, BFLOAT16])
def test_numbers_that_are_none_are_counted(dtype):
    array = np.ones((300, 2, 5), dtype)
    files.check_finite("w", array)
    files.check_finite("w", array[::2, 1].T)
    files.check_finite("w", array[:0])
    array[7, 1, 2], array[8, 0, 0], array[8, 0, 1] = np.nan, np.inf, -np.inf
    for view in (array, array.T, array[:, ::-1]):
        with pytest.raises(ConfigError, match="'w' holds 3 NaN or infinite numbers of 3000"):
            files.check_finite("w", view)
    files.check_finite("w", array[9:])


@pytest.mark.parametrize("bits", [0x7D01, 0x7C01, 0x7F81, 0xFFC0])
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
def test_nan_of_every_kind_is_found(bits, dtype):
    array = np.full(10, bits, np.uint16).view(dtype)
    if np.isnan(array.astype(np.float32)).all():
        with pytest.raises(ConfigError, match="holds 10 NaN"):
            files.check_finite("w", array)
    else:  # the larger range of bfloat16
        files.check_finite("w", array)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_])
def test_integers_are_finite(dtype):
    files.check_finite("w", np.ones(3, dtype))


# Damage


def weights_of(kind, folder):
    """A small file of a kind, as bytes."""
    rng = np.random.default_rng(0)
    arrays = {
        f"blocks.{i}.weight": rng.normal(size=(3, i)).astype(dtype)
        for i, dtype in enumerate(
            [np.float32, np.float16, BFLOAT16, np.float64, np.int64, np.bool_]
        )
    }
    return WRITERS[kind](folder / kind.replace(" ", "_"), arrays).read_bytes()


@pytest.mark.parametrize("kind", WRITERS)
def test_truncated_files_are_refused(tmp_path, kind):
    data = weights_of(kind, tmp_path)
    path = tmp_path / "cut"
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(ConfigError, match=str(path)):
            files.read(path)


@pytest.mark.parametrize("kind", WRITERS)
def test_damaged_files_load_or_are_refused(tmp_path, kind):
    data = weights_of(kind, tmp_path)
    files.read(tmp_path / kind.replace(" ", "_"))  # imports what it needs
    inside = safetensors_inside if kind == "safetensors" else damaged_inside
    rng = np.random.default_rng(zlib.crc32(kind.encode()))
    path = tmp_path / "damaged"
    refused = 0
    for i in range(400):
        path.write_bytes((damaged if i % 2 else inside)(data, rng))
        with nothing_runs():
            try:
                weights = files.read(path)
            except ConfigError as error:
                assert str(path) in str(error)
                refused += 1
                continue
        for array in weights.arrays.values():
            array.tobytes()
    assert 150 < refused < 400


def test_reading_needs_neither_torch_nor_training(tmp_path):
    path = write_pth(tmp_path / "w", {"w": np.ones(2, np.float32)})
    code = (
        "import sys\n"
        "for name in ('torch', 'grain', 'orbax', 'absl', 'ml_collections', 'tensorflow_datasets',\n"
        "             'fsspec', 'huggingface_hub', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "from cropr_jax.convert import files\n"
        f"print(files.read({str(path)!r}).arrays['w'].tolist())\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[1.0, 1.0]\n"
