"""Every kind of source: records, ids, class names, sub-splits, pickling, clear errors."""

import io
import json
import pickle
import shutil

import numpy as np
import pytest
import tensorflow_datasets as tfds
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from cropr_jax.data import digits, records
from cropr_jax.data.open import Splits, open_source
from cropr_jax.data.readers import tfds as tfds_source
from cropr_jax.data.readers import tfrecord
from cropr_jax.errors import ConfigError


def fake(**changes):
    data = {"source": "fake", "num_examples": 10, "image_size": (4, 6), "num_classes": 3}
    return {**data, **changes}


def save_image(path, seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(seed).integers(0, 256, (6, 5, 3), np.uint8)
    Image.fromarray(values).save(path)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The digits in array_record, and the same records copied to two tfrecord shards a split."""
    root = tmp_path_factory.mktemp("tfds")
    original = digits.prepare(str(root / "array_record"))
    builder = tfds.builder_from_directory(original)
    copy = root / "tfrecord" / "cropr_digits_copy" / "1.0.0"
    copy.mkdir(parents=True)
    shutil.copy(original / "features.json", copy)
    info = json.loads((original / "dataset_info.json").read_text())
    info.update(name="cropr_digits_copy", fileFormat="tfrecord")
    raw = {"image": tfds.decode.SkipDecoding()}
    for split in info["splits"]:
        split["filepathTemplate"] = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
        read = builder.as_data_source(split["name"], decoders=raw).data_source
        records = [read[i] for i in range(len(read))]
        cut = len(records) // 3
        split["shardLengths"] = [str(cut), str(len(records) - cut)]
        for number, part in enumerate((records[:cut], records[cut:])):
            name = f"cropr_digits_copy-{split['name']}.tfrecord-{number:05}-of-00002"
            tfrecord.write_records(copy / name, part)
    (copy / "dataset_info.json").write_text(json.dumps(info))
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def open_digits(root, kind, split):
    name = {"array_record": "cropr_digits", "tfrecord": "cropr_digits_copy"}[kind]
    data = {"source": "tfds", "name": name, "dir": str(root / kind)}
    return open_source(data, split)


@pytest.mark.parametrize(
    "split", ["train", "test", "train[10%:30%]", "test[-5:]", "train[470:490]"]
)
def test_tfrecord_and_array_record_copies_give_equal_records(prepared, split):
    left = open_digits(prepared, "array_record", split)
    right = pickle.loads(pickle.dumps(open_digits(prepared, "tfrecord", split)))
    assert len(left) == len(right) > 0
    assert left.class_names == right.class_names and left.num_classes == 10
    for i in {0, 1, len(left) // 3, len(left) - 1}:
        assert left[i] == right[i]
        assert isinstance(left[i]["image"], bytes), "images stay encoded"


def test_ids_are_those_of_the_whole_split(prepared):
    whole = open_digits(prepared, "tfrecord", "train")
    part = open_digits(prepared, "tfrecord", "train[100:200]")
    assert [part[i]["id"] for i in (0, 99)] == [100, 199]
    assert part[7] == whole[107]
    with pytest.raises(IndexError):
        part[100]


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 3000),
    low=st.none() | st.integers(-100, 100),
    high=st.none() | st.integers(-100, 100),
    unit=st.sampled_from(["", "%"]),
)
def test_slices_are_tfds_slices(size, low, high, unit):
    assume(low is not None or high is not None)
    start, stop = ("" if bound is None else f"{bound}{unit}" for bound in (low, high))
    text = f"train[{start}:{stop}]"
    name, bounds = records.parse_split(text)
    assert name == "train"
    template = tfds.core.ShardedFileTemplate(
        data_dir="/nowhere", dataset_name="d", split="train", filetype_suffix="tfrecord"
    )
    info = tfds.core.SplitInfo(
        name="train", shard_lengths=[size], num_bytes=0, filename_template=template
    )
    try:
        (told,) = tfds.core.ReadInstruction.from_spec(text).to_absolute({"train": info})
        expected = (told.from_ or 0, size if told.to is None else told.to)
    except ValueError:  # a bound beyond the split
        expected = (0, 0)
    if expected[0] >= expected[1]:
        with pytest.raises(ConfigError, match="none or do not exist"):
            bounds(size)
    else:
        assert bounds(size) == expected


@pytest.mark.parametrize("text", ["train+test", "train[", "train[1:2:3]", "", "train[a:b]"])
def test_other_split_strings_are_refused(text):
    with pytest.raises(ConfigError, match="data split"):
        records.parse_split(text)


def copy_of(prepared, tmp_path):
    shutil.copytree(prepared / "tfrecord", tmp_path / "tfrecord")
    return next((tmp_path / "tfrecord").glob("*/*"))


def test_bad_tfrecord_shards_are_named(prepared, tmp_path):
    folder = copy_of(prepared, tmp_path)
    shard = sorted(folder.glob("*train*"))[1]
    content = shard.read_bytes()
    for broken, message in [
        (content[:-100], "truncated shard"),
        (b"", "empty shard: found 0 records, expected"),
        (b"\xff\xd8\xff\xe0 a photo", "not a TFRecord file"),
    ]:
        shard.write_bytes(broken)
        with pytest.raises(tfrecord.RecordFileError, match=f"{shard.name}: {message}"):
            open_digits(tmp_path, "tfrecord", "train")
    shard.unlink()
    with pytest.raises(tfrecord.RecordFileError, match=f"{shard.name}: shard not found"):
        open_digits(tmp_path, "tfrecord", "train")


def test_missing_tfds_data_says_where_it_looked_and_what_to_set(prepared, tmp_path, monkeypatch):
    data = {"source": "tfds", "name": "imagenet2012", "env": "MY_DATA"}
    monkeypatch.setenv("MY_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"{tmp_path}/imagenet2012/.*MY_DATA"):
        open_source(data, "train")
    monkeypatch.setenv("MY_DATA", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"gone is no folder.*MY_DATA"):
        open_source(data, "train")
    with pytest.raises(ConfigError, match=r"'val'.*has test, train"):
        open_digits(prepared, "tfrecord", "val")


def test_newest_version_is_taken(tmp_path):
    for version in ("1.9.0", "1.10.0"):
        (tmp_path / "d" / version).mkdir(parents=True)
        (tmp_path / "d" / version / "dataset_info.json").touch()
    assert tfds_source.find_prepared(tmp_path, "d", "X").name == "1.10.0"
    assert tfds_source.find_prepared(tmp_path, "d:1.9.0", "X").name == "1.9.0"


def test_arrays(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (7, 5, 4, 3), np.uint8)
    labels = np.array([0, 1, 2, 0, 1, 2, 0], np.int32)
    names = np.array(["cat", "dog", "fox"])
    np.savez(tmp_path / "train_0.npz", images=images[:4], labels=labels[:4], class_names=names)
    np.savez(tmp_path / "train_1.npz", images=images[4:], labels=labels[4:], class_names=names)
    np.savez(tmp_path / "grey.npz", images=images[..., 0], labels=labels)
    data = {"source": "arrays", "dir": str(tmp_path)}
    source = open_source(data, "train")
    source = pickle.loads(pickle.dumps(source))
    assert len(source) == 7 and source.class_names == ("cat", "dog", "fox")
    np.testing.assert_array_equal(source[5]["image"], images[5])
    assert [source[i]["label"] for i in range(7)] == labels.tolist()
    grey = open_source(data, "grey[2:]")
    assert grey[0]["image"].shape == (5, 4, 1) and grey[0]["id"] == 2 and grey.num_classes == 3


def test_bad_arrays_are_named(tmp_path):
    data = {"source": "arrays", "dir": str(tmp_path)}
    images, labels = np.zeros((2, 4, 4, 3), np.uint8), np.array([0, 1])
    np.savez(tmp_path / "nolabels.npz", images=images)
    np.savez(tmp_path / "floats.npz", images=images.astype(np.float32), labels=labels)
    np.savez(tmp_path / "short.npz", images=images, labels=labels[:1])
    np.savez(tmp_path / "names.npz", images=images, labels=labels, class_names=np.array(["a"]))
    for split, message in [
        ("train", "the folder holds floats.npz, names.npz"),
        ("nolabels", "no labels in it"),
        ("floats", "images are float32"),
        ("short", "labels are"),
        ("names", "labels from 0 to 1, expected 0 to 0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            open_source(data, split)


def test_image_folder_of_classes(tmp_path):
    for split, name, file in [
        ("train", "dog", "b.png"),
        ("train", "cat", "a.JPG"),
        ("train", "cat", "c.webp"),
        ("test", "dog", "d.jpeg"),
    ]:
        save_image(tmp_path / split / name / file)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    data = {"source": "image_folder", "dir": str(tmp_path)}
    train = pickle.loads(pickle.dumps(open_source(data, "train")))
    assert train.class_names == ("cat", "dog")
    assert [train[i]["label"] for i in range(len(train))] == [0, 0, 1]
    assert Image.open(io.BytesIO(train[0]["image"])).size == (5, 6)
    # No cat among the test images, and still dog is class 1.
    test = Splits(data | {"train": "train", "eval": {"test": "test"}}).eval("test")
    assert test.class_names == ("cat", "dog") and test[0]["label"] == 1


@pytest.mark.parametrize("place", [".", "val"])
@pytest.mark.parametrize("images", ["images", "."])
def test_image_folder_with_listing(tmp_path, place, images):
    folder = tmp_path / place
    for file in ("x.jpg", "y.jpg"):
        save_image(folder / images / file)
    data = {"source": "image_folder", "dir": str(tmp_path)}
    entries = [
        {"file_name": "x.jpg", "label": 2, "name": "fox"},
        {"file_name": "y.jpg", "label": 0, "name": "cat"},
    ]
    for listing, labels, names in [
        ({"images": entries}, [2, 0], ("cat", "1", "fox")),
        ({"x.jpg": 1, "y.jpg": 0}, [1, 0], ("0", "1")),
        ({"x.jpg": "dog", "y.jpg": "cat"}, [1, 0], ("cat", "dog")),
        ({"images": entries, "class_names": list("abcd")}, [2, 0], tuple("abcd")),
    ]:
        (folder / "labels.json").write_text(json.dumps(listing))
        source = open_source(data, "val")
        assert [source[i]["label"] for i in range(2)] == labels
        assert source.class_names == names
    (folder / "labels.json").write_text(json.dumps({"x.jpg": 1}))
    assert open_source({**data, "num_classes": 1000}, "val").num_classes == 1000


def test_bad_image_folders_are_named(tmp_path):
    data = {"source": "image_folder", "dir": str(tmp_path)}
    with pytest.raises(ConfigError, match="neither .*labels.json.*holds nothing"):
        open_source(data, "train")
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no \.jpeg"):
        open_source(data, "train")
    for listing, message in [
        ([1, 2], "expected"),
        ({"gone.jpg": 0}, "1 files that do not exist.*gone.jpg"),
        ({}, "at least one"),
    ]:
        (tmp_path / "labels.json").write_text(json.dumps(listing))
        with pytest.raises(ConfigError, match=message):
            open_source(data, "train")


def test_fake_images_are_the_same_every_time():
    one, two = (open_source(fake(), "train") for _ in range(2))
    assert len(one) == 10 and one.num_classes == 3
    for i in range(10):
        np.testing.assert_array_equal(one[i]["image"], two[i]["image"])
        assert one[i]["image"].shape == (4, 6, 3) and one[i]["label"] == i % 3


def test_unknown_kind_and_missing_folder():
    with pytest.raises(ConfigError, match=r"config\.data\.source is 'zip'"):
        open_source({"source": "zip"}, "train")
    with pytest.raises(ConfigError, match=r"Set config\.data\.dir"):
        open_source({"source": "arrays"}, "train")
