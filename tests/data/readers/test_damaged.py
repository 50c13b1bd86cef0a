"""Data sets that are damaged, or that other programs wrote: the right value, or one line."""

import json

import numpy as np
import pytest
from PIL import Image

from cropr_jax.data.open import open_source
from cropr_jax.errors import ConfigError

GOOD = {"images": [{"file_name": "a.png", "label": 1}, {"file_name": "b.png", "label": 0}]}


def folder(path, text):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4)).save(path / name)
    (path / "labels.json").write_bytes(text)
    return {"source": "image_folder", "dir": str(path), "name": "mine"}


def test_a_byte_order_mark_is_passed_over(tmp_path):
    source = open_source(folder(tmp_path, json.dumps(GOOD).encode("utf-8-sig")), "train")
    assert [source[i]["label"] for i in range(2)] == [1, 0]


@pytest.mark.parametrize("content", [
    b"", b"{", b'{"a.png": 1,}', b'["a.png", "b.png"]', b"3", b"null", b'"a"', b"\xff\xfe{}",
    b'{"images": "a.png"}', b'{"images": []}', b'{"images": ["a.png"]}', b'{"images": [[1]]}',
    b'{"images": [{"file_name": 3, "label": 1}]}', b'{"images": [{"file_name": "a.png"}]}',
    b'{"images": [{"file_name": "a.png", "label": 1.5}]}', b'{"a.png": null}', b'{"a.png": true}',
    b'{"a.png": -1}', b'{"a.png": 1, "b.png": "cat"}', b'{"none.png": 1}',
    b'{"images": [{"file_name": "a.png", "label": 1, "name": 5}]}',
    b'{"images": [{"file_name": "a.png", "label": 1}], "class_names": 7}',
    b'{"images": [{"file_name": "a.png", "label": 1}], "class_names": ["x"]}',
    b'{"images": [{"file_name": "a.png", "label": "y"}], "class_names": ["x"]}',
    b'{"images": [{"file_name": "a.png", "label": 1}], "class_names": ["x", 2]}', b"[" * 100_000,
])  # fmt: skip
def test_a_wrong_labels_json_is_one_line(tmp_path, content):
    with pytest.raises(ConfigError) as said:
        open_source(folder(tmp_path, content), "train")
    assert str(tmp_path / "labels.json") in str(said.value) and "\n" not in str(said.value)


def npz(path, **arrays):
    np.savez(path, **arrays)
    return path.read_bytes()


@pytest.mark.parametrize("kind", ["empty", "cut", "page", "objects", "no example", "text"])
def test_a_wrong_npz_is_one_line(tmp_path, kind):
    path = tmp_path / "train.npz"
    images = np.zeros((40, 9, 9, 3), np.uint8)
    whole = npz(path, images=images, labels=np.zeros(40, int))
    contents = {"empty": b"", "cut": whole[: len(whole) // 2], "page": b"<html>", "text": b"text"}
    if kind == "objects":
        npz(path, images=images, labels=np.array([None] * 40))
    elif kind == "no example":
        npz(path, images=images[:0], labels=np.zeros(0, int))
    else:
        path.write_bytes(contents[kind])
    with pytest.raises(ConfigError) as said:
        open_source({"source": "arrays", "dir": str(tmp_path), "name": "mine"}, "train")
    assert str(path) in str(said.value) and "\n" not in str(said.value)


def test_what_systems_leave_behind_is_no_class_and_no_image(tmp_path):
    for name in ("train/cat/a.png", "train/dog/b.png", "train/.ipynb_checkpoints/c.png",
                 "train/__MACOSX/d.png", "train/cat/._a.png", "raw/2023/bird/e.png"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    source = open_source({"source": "image_folder", "dir": str(tmp_path), "name": ""}, "train")
    assert source.class_names == ("cat", "dog") and len(source) == 2


def masks(path, content, meta):
    for name in ("images", "labels"):
        (path / name / "train").mkdir(parents=True)
    (path / "meta.json").write_text(json.dumps(meta))
    Image.new("RGB", (10, 10)).save(path / "images" / "train" / "0.png")
    ids = np.repeat(np.array(content, np.uint8), 10).reshape(10, 10)
    Image.fromarray(ids).save(path / "labels" / "train" / "0.png")
    return {"source": "segmentation_folder", "dir": str(path), "name": ""}


@pytest.mark.parametrize(("content", "meta", "message"), [
    # Foreground that is 255, which nobody said is to be ignored.
    ([0] * 7 + [255] * 3, {"classes": ["bg", "thing"]}, "30% of the pixels have the id 255, igno"),
    ([0] * 5 + [1] + [255] * 4, ["bg", "thing"], "all classes but the commonest have 10%"),
    ([0] * 9 + [255], {"classes": [{"id": 0, "name": "a"}, {"id": 255, "name": "b"}]},
     "lists id 255 as a class, which is the ignored id unless another is named"),
    # Nothing that counts, whoever said it.
    ([255] * 10, {"classes": ["bg", "thing"], "ignore_id": 255}, "no pixel of its masks counts"),
    ([255] * 10, ["bg", "thing"], "counts, all 100 are of the ignored id 255"),
    ([0] * 10, {"classes": ["bg", "thing"], "ignore_id": 0}, "no pixel of its masks counts"),
])  # fmt: skip
def test_a_foreground_that_is_ignored_by_mistake(tmp_path, content, meta, message):
    with pytest.raises(ConfigError) as said:
        open_source(masks(tmp_path, content, meta), "train")
    assert message in str(said.value) and "\n" not in str(said.value)


@pytest.mark.parametrize(("content", "meta", "notes"), [
    ([0] * 6 + [1] * 3 + [255], ["bg", "thing"], ()),  # a border that does not count
    ([0] * 3 + [255] * 7, {"classes": ["bg", "thing"], "ignore_id": 255},
     ("1 of 2 classes are in no mask: 'thing'",)),
    ([0] * 10, ["bg", "thing", "other"], ("2 of 3 classes are in no mask: 'thing', 'other'",)),
])  # fmt: skip
def test_what_is_said_to_be_ignored_is(tmp_path, content, meta, notes):
    assert open_source(masks(tmp_path, content, meta), "train").reader.notes == notes


def test_what_a_folder_leaves_out_is_said(tmp_path):
    for name in (
        "train/cat/a.png",
        "train/cat/notes.txt",
        "train/cat/b.bmp",
        "train/dog/sub/c.png",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("txt"):
            (tmp_path / name).write_text("no image")
        else:
            Image.new("RGB", (4, 4)).save(tmp_path / name)
    source = open_source({"source": "image_folder", "dir": str(tmp_path), "name": ""}, "train")
    assert source.class_names == ("cat", "dog") and len(source) == 1
    assert source.reader.notes == (
        "no image in 1 classes: dog",
        "3 files are left out: 1 .bmp, 1 .txt, 1 in deeper folders",
    )
