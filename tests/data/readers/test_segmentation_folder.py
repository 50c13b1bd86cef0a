"""Folders of images and masks: both layouts, and every mistake found before training."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA
from PIL import Image

from cropr_jax.data import annotations, preprocess
from cropr_jax.data.open import open_source
from cropr_jax.data.readers import segmentation_folder
from cropr_jax.errors import ConfigError

META = {"classes": [{"id": i, "name": n} for i, n in enumerate("abc")], "ignore_id": 255}


def save(root, split, name, size=(6, 8), ids=(0, 1, 2, 255), suffix=".jpg"):
    """One image, whose every pixel is its number, and a random mask."""
    rng = np.random.default_rng(len(name))
    mask = rng.choice(np.array(ids, np.uint8), size)
    for kind, array, end in (
        ("images", np.full((*size, 3), len(name), np.uint8), suffix),
        ("labels", mask, ".png"),
    ):
        folder = root / kind / split
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(folder / f"{name}{end}")
    return mask


def write_meta(root, content):
    (root / "meta.json").write_text(json.dumps(content))


def source(root, split="train", **data):
    return open_source({"source": "segmentation_folder", "dir": str(root), **data}, split)


def test_split_folders(tmp_path):
    write_meta(tmp_path, META)
    masks = [
        save(tmp_path, "train", "b", (6, 8)),
        save(tmp_path, "train", "cc", (9, 5), suffix=".png"),
        save(tmp_path, "train", "ddd", (4, 4), suffix=".JPEG"),
    ]
    save(tmp_path, "val", "e")
    (tmp_path / "images" / "train" / "notes.txt").write_text("no image")
    opened = pickle.loads(pickle.dumps(source(tmp_path)))
    assert len(opened) == 3 and opened.class_names == ("a", "b", "c")
    assert opened.reader.largest() == (9, 8), "greatest height and width, not of one image"
    for i, mask in enumerate(masks):
        np.testing.assert_array_equal(opened[i]["label"], mask)
        image = np.asarray(preprocess.decode(opened[i]["image"]))
        assert opened[i]["id"] == i and image.shape == (*mask.shape, 3)
        assert np.abs(image.astype(int) - (i + 1)).max() <= 2
    assert len(source(tmp_path, "val")) == 1


def test_without_split_folders_there_is_one_split(tmp_path):
    write_meta(tmp_path, ["a", "b", "c"])
    for name in ("q", "rr", "sss", "tttt", "uuuuu"):
        save(tmp_path, ".", name)
    (tmp_path / "images" / ".thumbnails").mkdir()
    train, test = source(tmp_path, "all[:80%]"), source(tmp_path, "all[80%:]")
    assert (len(train), len(test), test[0]["id"]) == (4, 1, 4)
    with pytest.raises(ConfigError, match=r"'train': .*images has all\. .*'all\[:80%\]'"):
        source(tmp_path)


def test_looked_at_once(tmp_path, monkeypatch):
    write_meta(tmp_path, META)
    save(tmp_path, "train", "b")
    first = source(tmp_path)
    monkeypatch.setattr(segmentation_folder, "read_mask", None)
    assert source(tmp_path).reader is first.reader
    monkeypatch.setattr(segmentation_folder, "read_mask", annotations.read_mask)
    # A new file is seen.
    save(tmp_path, "train", "cc")
    assert len(source(tmp_path)) == 2


def broken(root, change):
    save(root, "train", "b")
    mask = root / "labels" / "train" / "b.png"
    if change == "range":
        save(root, "train", "b", ids=(0, 7))
    elif change == "colours":
        Image.fromarray(np.zeros((6, 8, 3), np.uint8)).save(mask)
    elif change == "size":
        Image.fromarray(np.zeros((8, 6), np.uint8)).save(mask)
    elif change == "no mask":
        save(root, "train", "cc")
        mask.unlink()
    elif change == "no image":
        save(root, "train", "cc")
        (root / "images" / "train" / "b.jpg").unlink()
    elif change == "twice":
        Image.new("RGB", (8, 6)).save(root / "images" / "train" / "b.webp")
    elif change == "no photo":
        (root / "images" / "train" / "b.jpg").write_text("no image")
    elif change == "empty":
        (root / "images" / "train" / "b.jpg").unlink()
    else:
        (root / "images" / "val").mkdir()


@pytest.mark.parametrize(
    "change, split, message",
    [
        ("range", "train", r"b\.png: id 7 in the mask, expected 0 to 2 \(3 classes\) or 255"),
        ("colours", "train", r"b\.png: a mask of mode RGB"),
        ("size", "train", r"b\.png: 8x6 pixels .*b\.jpg has 6x8"),
        ("no mask", "train", r"images/train/b\.jpg: no mask of that name in .*labels/train"),
        ("no image", "train", r"labels/train/b\.png: no image of that name in .*images/train"),
        ("twice", "train", r"b\.webp: beside b\.jpg"),
        ("no photo", "train", r"b\.jpg: no image that can be read"),
        ("empty", "train", r"images/train: no \.jpeg, \.jpg, \.png, \.webp file"),
        ("no labels", "val", r"'val': .*images/val, but no .*labels/val"),
    ],
)
def test_bad_files_are_named_before_training(tmp_path, change, split, message):
    write_meta(tmp_path, META)
    broken(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        source(tmp_path, split)


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no meta\.json.*ignore_id"):
        source(tmp_path)
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(ConfigError, match=r"meta\.json: no JSON"):
        source(tmp_path)
    write_meta(tmp_path, {**META, "num_classes": 4})
    with pytest.raises(ConfigError, match="num_classes is 4, but its list has 3"):
        source(tmp_path)
    write_meta(tmp_path, META)
    with pytest.raises(ConfigError, match="no folder 'images'"):
        source(tmp_path)
    save(tmp_path, "train", "b")
    with pytest.raises(ConfigError, match=r"'test': .*images has train\."):
        source(tmp_path, "test")
    with pytest.raises(ConfigError, match=r"3 classes count .*num_classes is 11"):
        source(tmp_path, num_classes=11)


@pytest.mark.real_data
@pytest.mark.parametrize(
    "name, split, examples, classes, last, largest",
    [
        ("camvid", "train", 367, 11, "Bicyclist", (360, 480)),
        ("camvid", "val", 101, 11, "Bicyclist", (360, 480)),
        ("coco_semantic133", "all[:80%]", 80, 133, "rug-merged", (512, 512)),
    ],
)
def test_real_folders_open_as_they_are(name, split, examples, classes, last, largest):
    opened = source(DATA / name, split)
    assert len(opened) == examples and opened.num_classes == classes
    assert opened.class_names[-1] == last and opened.reader.largest() == largest
    label = opened[0]["label"]
    assert set(np.unique(label)) <= {*range(classes), 255}
    ignored = json.loads((Path(DATA) / name / "meta.json").read_text())["ignore_id"]
    mask = np.asarray(Image.open(opened.reader.masks[0]))
    np.testing.assert_array_equal(label == 255, mask == ignored)
