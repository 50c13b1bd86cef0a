"""Class names of the splits of a run: matched by name, or refused in one line."""

import json
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

from cropr_jax.data.classes import aligned
from cropr_jax.data.open import Splits
from cropr_jax.data.records import CLASS, IGNORE, MAP, Source
from cropr_jax.errors import ConfigError


@dataclass(frozen=True)
class Reader:
    class_names: tuple[str, ...]
    kind: str = CLASS

    def __len__(self):
        return len(self.class_names)

    def __call__(self, index):
        label = index
        if self.kind == MAP:
            label = np.full((2, 3), index, np.uint8)
            label[0, 0] = IGNORE
        return np.zeros((2, 3, 3), np.uint8), label

    def largest(self):
        return 2, 3


def match(own, names, kind=CLASS):
    source = Source(Reader(tuple(own), kind), 0, len(own))
    return pickle.loads(pickle.dumps(aligned(source, tuple(names), "data split 'test'", "the run")))


@pytest.mark.parametrize(("own", "names", "labels"), [
    (["a", "b"], ["a", "b"], [0, 1]),
    (["b", "a"], ["a", "b"], [1, 0]),  # another order
    (["c"], ["a", "b", "c"], [2]),  # a class alone
    (["a", "c"], ["c", "b", "a"], [2, 0]),
    (["0", "1", "10", "3"], ["0", "1", "10", "2", "3"], [0, 1, 2, 4]),  # folders sort as text
    (["a", "1"], ["a", "b", "1"], [0, 2]),
    (["0", "1"], ["0", "1", "2"], [0, 1]),  # numbers that do not reach the last one
    (["0", "1", "2"], ["0", "1"], [0, 1, 2]),  # or beyond: the head may have it
    (["cat", "1"], ["cat", "dog", "2"], [0, 1]),  # numbers, of which some have names
    (["\u00e9", " a"], [" a", "\u00e9"], [1, 0]),
])  # fmt: skip
def test_labels_by_name(own, names, labels):
    found = match(own, names)
    assert [found[i]["label"] for i in range(len(found))] == labels
    assert all(type(found[i]["label"]) is int for i in range(len(found)))
    if len(own) <= len(names):
        assert found.class_names == tuple(names)


def test_maps_by_name():
    found = match(["c", "a"], ["a", "b", "c"], MAP)
    for i, label in enumerate((2, 0)):
        expected = np.full((2, 3), label, np.uint8)
        expected[0, 0] = IGNORE
        np.testing.assert_array_equal(found[i]["label"], expected)
        assert found[i]["label"].dtype == np.uint8
    assert found.reader.largest() == (2, 3)


@pytest.mark.parametrize(("own", "names", "message"), [
    (["ant", "bee"], ["bee", "cat"], r"1 of its 2 classes ('ant') is not among the 2 of the run"),
    (["kat"], ["cat", "dog"], "did you mean cat?"),
    (["0", "1"], ["cat", "dog"], "2 of its 2 classes ('0', '1') are not among"),
    (["cat", "dog"], ["0", "1"], "2 of its 2 classes ('cat', 'dog') are not among"),
    (["Cat"], ["cat"], "did you mean cat?"),
    (["cat "], ["cat"], "('cat ') is not among"),
    (["a", "b", "c", "d", "e"], ["x"], "('a', 'b', 'c' and 2 more)"),
    (["0", "1", "10", "2"], ["0", "1", "10", "3"], "1 of its 4 classes ('2') is not among"),
    (["a", "a"], ["a", "b"], "'a' names several classes"),
    (["a"], ["b", "a", "a"], "the run: 'a' names several classes"),
])  # fmt: skip
@pytest.mark.parametrize("kind", [CLASS, MAP])
def test_other_names_are_one_line(own, names, message, kind):
    with pytest.raises(ConfigError) as said:
        match(own, names, kind)
    assert message in str(said.value) and "\n" not in str(said.value)


def test_labels_of_other_kinds_are_left_alone():
    source = Source(Reader(("depth",), "depth maps"), 0, 1)
    assert aligned(source, ("other",), "a", "b") is source


def listing(path, entries):
    (path / "images").mkdir(parents=True)
    for name in entries:
        Image.new("RGB", (4, 4)).save(path / "images" / name)
    (path / "labels.json").write_text(json.dumps(entries))


def test_listings_in_another_order(tmp_path):
    """Names are numbered in each by its own order: only by name are they the same classes."""
    listing(tmp_path / "train", {"a.png": "dog", "b.png": "cat", "c.png": "bee"})
    listing(tmp_path / "test", {"a.png": "dog"})
    data = {"source": "image_folder", "dir": str(tmp_path), "train": "train"}
    splits = Splits(data | {"eval": {"test": "test"}})
    assert splits.eval("test")[0]["label"] == splits.train[0]["label"] == 2
    assert Splits(data | {"eval": {"test": "test"}}, ("dog", "bee", "cat")).train[0]["label"] == 0
