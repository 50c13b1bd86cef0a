"""Offset index over TFRecord files: right records, and clear errors for bad shards."""

import os
import pickle
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cropr_jax.data.readers import tfrecord

quick = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
shards_of_records = st.lists(st.lists(st.binary(max_size=40), max_size=6), min_size=1, max_size=4)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder, shards):
    paths = [folder / f"{i}.tfrecord" for i in range(len(shards))]
    for path, records in zip(paths, shards, strict=True):
        tfrecord.write_records(path, records)
    return paths


def test_masked_crc_matches_the_published_bytes():
    # The first twelve bytes of any TFRecord file whose first record has three bytes.
    assert tfrecord.masked_crc32c(struct.pack("<Q", 3)) == _reference_masked_crc(
        struct.pack("<Q", 3)
    )


def _reference_masked_crc(data):
    """CRC-32C bit by bit (reflected polynomial 0x82F63B78), then TFRecord's mask."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32


@quick
@given(shards=shards_of_records)
def test_reader_returns_every_record_in_order(tmp_path, shards):
    paths = write(tmp_path, shards)
    reader = tfrecord.TFRecordReader(paths, [len(records) for records in shards])
    expected = [data for records in shards for data in records]
    assert [reader[i] for i in range(len(reader))] == expected
    copy = pickle.loads(pickle.dumps(reader))
    assert [copy[i] for i in reversed(range(len(copy)))] == expected[::-1]


@quick
@given(records=st.lists(st.binary(max_size=40), min_size=1, max_size=5), cut=st.integers(1, 10**6))
def test_truncated_shard_is_refused(tmp_path, records, cut):
    (path,) = write(tmp_path, [records])
    size = os.path.getsize(path)
    os.truncate(path, size - 1 - cut % (size - 1))
    # A cut between two records leaves a well-formed file of fewer records.
    with pytest.raises(tfrecord.RecordFileError, match=r"truncated shard|wrong number|empty"):
        tfrecord.TFRecordReader([path], [len(records)])


@quick
@given(content=st.binary(min_size=12, max_size=100))
def test_other_file_is_refused(tmp_path, content):
    length, crc = struct.unpack("<QI", content[:12])
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    if tfrecord.masked_crc32c(content[:8]) == crc:
        return
    with pytest.raises(tfrecord.RecordFileError, match="not a TFRecord file"):
        tfrecord.scan_offsets(path)


def test_empty_missing_and_miscounted_shards_name_file_found_and_expected(tmp_path):
    full, empty = write(tmp_path, [[b"a", b"b"], []])
    assert len(tfrecord.TFRecordReader([full, empty], [2, 0])) == 2
    with pytest.raises(
        tfrecord.RecordFileError, match=r"1\.tfrecord: empty.*0 records, expected 3"
    ):
        tfrecord.TFRecordReader([full, empty], [2, 3])
    with pytest.raises(
        tfrecord.RecordFileError, match=r"0\.tfrecord: wrong.*2 records, expected 5"
    ):
        tfrecord.TFRecordReader([full], [5])
    with pytest.raises(tfrecord.RecordFileError, match=r"gone\.tfrecord: shard not found"):
        tfrecord.TFRecordReader([tmp_path / "gone.tfrecord"], [1])
    with pytest.raises(tfrecord.RecordFileError, match="found 1 shard files, expected 2"):
        tfrecord.TFRecordReader([full], [2, 2])


def test_damaged_record_is_refused_when_read(tmp_path):
    (path,) = write(tmp_path, [[b"hello", b"world"]])
    content = bytearray(path.read_bytes())
    content[content.index(b"world")] ^= 1
    path.write_bytes(content)
    reader = tfrecord.TFRecordReader([path], [2])
    assert reader[0] == b"hello"
    with pytest.raises(tfrecord.RecordFileError, match="record 1 .* damaged"):
        reader[1]
    with pytest.raises(IndexError):
        reader[2]


def test_index_is_cached_until_the_file_changes(tmp_path, monkeypatch):
    (path,) = write(tmp_path, [[b"a", b"b"]])
    first = tfrecord.load_offsets(path)
    monkeypatch.setattr(tfrecord, "scan_offsets", lambda path: np.asarray([0, 1]))
    np.testing.assert_array_equal(tfrecord.load_offsets(path), first)
    tfrecord.write_records(path, [b"a", b"b", b"c"])
    assert len(tfrecord.load_offsets(path)) == 2


def test_more_shards_than_open_files_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecord, "_MAX_OPEN_FILES", 2)
    paths = write(tmp_path, [[bytes([i])] for i in range(5)])
    reader = tfrecord.TFRecordReader(paths, [1] * 5)
    assert [reader[i] for i in range(5)] == [bytes([i]) for i in range(5)]
    assert len(reader._files) == 2


@pytest.mark.parametrize("damage", [
    lambda file: file.write_bytes(b""),
    lambda file: file.write_bytes(file.read_bytes()[:90]),
    lambda file: file.write_bytes(file.read_bytes()[:-8]),
    lambda file: file.write_text("no array"),
    lambda file: np.save(file, np.array(["text"])),
    lambda file: np.save(file, np.zeros(0, np.int64)),
    lambda file: np.save(file, np.arange(3)),
])  # fmt: skip
def test_a_damaged_index_heals(tmp_path, damage):
    path = tmp_path / "a.tfrecord"
    tfrecord.write_records(path, [b"one", b"three"])
    expected = tfrecord.load_offsets(path)
    (index,) = tfrecord.cache_dir().rglob("*.npy")
    damage(index)
    np.testing.assert_array_equal(tfrecord.load_offsets(path), expected)
    np.testing.assert_array_equal(np.load(index), expected)


def test_a_cache_that_cannot_be_written_costs_a_warning(tmp_path, monkeypatch, caplog):
    path = tmp_path / "a.tfrecord"
    tfrecord.write_records(path, [b"one", b"three"])
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    np.testing.assert_array_equal(tfrecord.load_offsets(path), tfrecord.scan_offsets(path))
    assert "cannot be kept in /proc/none/cropr_jax" in caplog.text
