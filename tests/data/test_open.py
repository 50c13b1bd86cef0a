"""Opening the data set of a config: by its source's name, each split once."""

import numpy as np
import pytest

from cropr_jax.data.open import READERS, Splits, open_source
from cropr_jax.data.readers.fake import Fake
from cropr_jax.errors import ConfigError

DATA = {
    "source": "counted",
    "train": "train[:8]",
    "eval": {"test": "test[2:50%]", "again": "train[:8]", "whole": "train"},
}


@pytest.fixture
def opened(monkeypatch):
    """Names that a reader of ten examples was opened for, one after the other."""
    names = []

    def count(data, split):
        names.append(split)
        return Fake(10, (4, 4), 3)

    monkeypatch.setitem(READERS, "counted", count)
    return names


def test_nothing_is_opened_before_it_is_asked_for(opened):
    splits = Splits(DATA)
    assert opened == []
    assert len(splits.eval("test")) == 3
    assert opened == ["train", "test"]  # the training split has the names of the classes
    opened.clear()
    assert len(Splits(DATA, ("class 0", "class 1", "class 2")).eval("test")) == 3
    assert opened == ["test"]


def test_each_split_is_opened_once(opened):
    """Also where training and evaluation read the same one; another slice is another split."""
    splits = Splits(DATA)
    train = splits.train
    assert splits.train is train and splits.eval("again") is train
    assert splits.eval("test") is splits.eval("test")
    assert opened == ["train", "test"]
    assert len(splits.eval("whole")) == 10 and len(train) == 8
    assert opened == ["train", "test", "train"]


def test_a_split_that_the_config_has_not(opened):
    message = r"^config\.data\.eval has no 'validation', only test, again, whole\. Name one of them"
    with pytest.raises(ConfigError, match=message):
        Splits(DATA).eval("validation")
    assert opened == []


def test_a_source_is_a_slice_with_the_ids_of_its_split(opened):
    source = open_source(DATA, "test[2:50%]")
    assert (source.start, source.stop, len(source)) == (2, 5, 3)
    whole = open_source(DATA, "test")
    record = source[1]
    assert record["id"] == 3 and record["label"] == whole[3]["label"] == 0
    np.testing.assert_array_equal(record["image"], whole[3]["image"])
    assert source.class_names == ("class 0", "class 1", "class 2") and source.num_classes == 3
    assert opened == ["test", "test"]


def test_an_unknown_source(opened):
    """All that there are are named, also one that was added."""
    with pytest.raises(ConfigError) as caught:
        open_source(DATA | {"source": "zip"}, "train")
    found = str(caught.value)
    assert found.startswith("config.data.source is 'zip', expected one of ")
    assert all(name in found for name in ("tfds", "image_folder", "counted")) and opened == []


def test_a_split_that_is_no_slice(opened):
    with pytest.raises(ConfigError, match=r"data split 'train\[3\]': expected a name with"):
        open_source(DATA, "train[3]")
    with pytest.raises(ConfigError, match="examples 4 to 11 of 10 are none or do not exist"):
        open_source(DATA, "train[4:11]")


@pytest.mark.parametrize("name", ["arrays", "image_folder", "segmentation_folder", "tfds"])
def test_a_folder_is_looked_for_where_the_config_says(name, tmp_path, monkeypatch):
    """In `dir`, or else where the variable `env` points to."""
    data = {"source": name, "name": "some_data", "env": "SOME_FOLDER", "num_classes": 2}
    monkeypatch.delenv("SOME_FOLDER", raising=False)
    if name != "tfds":  # which has a default
        with pytest.raises(ConfigError, match="Set the environment variable SOME_FOLDER or config"):
            open_source(data, "train")
    for where in ("variable", "dir"):
        place = tmp_path / where
        monkeypatch.setenv("SOME_FOLDER", str(tmp_path / "variable"))
        given = {"dir": str(place)} if where == "dir" else {}
        with pytest.raises(ConfigError, match=f"{place} is no folder"):
            open_source(data | given, "train")


def test_made_up_data():
    data = {"num_examples": 6, "image_size": [8, 12], "num_classes": 3}
    images = open_source({"source": "fake", **data}, "train[2:]")
    assert len(images) == 4 and images[0]["image"].shape == (8, 12, 3)
    assert [images[i]["label"] for i in range(4)] == [2, 0, 1, 2]
    maps = open_source({"source": "fake_segmentation", **data}, "train")
    assert maps[0]["label"].shape == maps[0]["image"].shape[:2] == (8, 12)
