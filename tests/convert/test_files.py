"""Files of weights: three formats by their content, damage, and what they cost."""

import json
import os
import struct
import subprocess
import sys
import time
import tracemalloc
import types
import zlib
from pathlib import Path

import numpy as np
import pytest
from weight_files import (
    BFLOAT16,
    GOOD,
    WRITERS,
    arrays_of,
    check,
    damaged,
    damaged_inside,
    nothing_runs,
    npy,
    safetensors_inside,
    write_npz,
    write_pth,
)

from cropr_jax.convert import files
from cropr_jax.errors import ConfigError


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


ENTRY = json.dumps(entry()).encode()


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
        (safetensors_bytes(b'{"w":%s,"w":%s}' % ((ENTRY,) * 2), bytes(4)), "two entries of one"),
        (
            safetensors_bytes(
                b'{"__metadata__":{"grid":"1x1","grid":"2x2"},"w":%s}' % ENTRY, bytes(4)
            ),
            "two entries of one",
        ),
        (safetensors_bytes({"w": entry(shape=(1,) * 99)}, bytes(4)), r"of shape '\(1, .*\.\.\.'"),
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
