"""From ids to labels: legends in every form, the shift of ADE20k, what is refused."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image

from cropr_jax.data.annotations import make_legend, read_mask
from cropr_jax.errors import ConfigError

NAMES = ["sky", "road", "void"]
LISTED = [{"id": i, "name": name} for i, name in enumerate(NAMES)]


def encoded(array, mode=None, palette=None):
    image = Image.fromarray(array, mode) if mode is None else Image.fromarray(array).convert(mode)
    if palette is not None:
        image = Image.fromarray(array, "L")
        image.putpalette(palette)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    "meta, data, names, ids, ignore",
    [
        (NAMES, {}, NAMES, (0, 1, 2), 255),
        (NAMES, {"ignore": None, "zero_is_ignored": False}, NAMES, (0, 1, 2), 255),
        ({"classes": NAMES, "ignore_id": 2}, {}, NAMES[:2], (0, 1), 2),
        ({"classes": LISTED, "ignore_id": 2, "num_classes": 3}, {}, NAMES[:2], (0, 1), 2),
        ({"classes": LISTED[::-1]}, {}, NAMES, (0, 1, 2), 255),
        (LISTED, {"ignore": 1}, ["sky", "void"], (0, 2), 1),
        ({"classes": NAMES, "ignore_id": 2}, {"ignore": 0}, NAMES[1:], (1, 2), 0),
        (NAMES, {"zero_is_ignored": True, "num_classes": 3}, NAMES, (1, 2, 3), 0),
        ({"classes": LISTED[1:], "ignore_id": 0}, {"zero_is_ignored": True}, NAMES[1:], (1, 2), 0),
        ([{"id": 7, "name": "road"}, {"id": 33, "name": "car"}], {}, ["road", "car"], (7, 33), 255),
    ],
)
def test_legends(meta, data, names, ids, ignore):
    legend = make_legend(meta, data, "meta.json")
    assert legend.class_names == tuple(names)
    assert (legend.ids, legend.ignore) == (ids, ignore)
    mask = np.array([[*ids, ignore]], np.uint8)
    labels = pickle.loads(pickle.dumps(legend)).labels(mask, "mask")
    assert labels.dtype == np.uint8 and labels.tolist() == [[*range(len(ids)), 255]]


def test_the_shift_of_ade20k_is_done_once():
    legend = make_legend([f"class {i}" for i in range(150)], {"zero_is_ignored": True}, "names")
    mask = np.arange(151, dtype=np.uint8)[None]
    labels = legend.labels(mask, "a.png")
    assert labels.tolist() == [[255, *range(150)]]
    with pytest.raises(ConfigError, match=r"a\.png: id 255 .*1 to 150 .*changed to labels before"):
        legend.labels(labels, "a.png")


def test_ids_beyond_the_classes_are_named():
    legend = make_legend(NAMES, {}, "names")
    with pytest.raises(ConfigError, match=r"a\.png: id 3, 9 in the mask, expected 0 to 2 \(3 cl"):
        legend.labels(np.array([[0, 9, 3, 255]], np.uint8), "a.png")


@pytest.mark.parametrize(
    "meta, data, message",
    [
        ({}, {}, "expected {.classes"),
        ([], {}, "expected {.classes"),
        ("names", {}, "expected {.classes"),
        ([{"id": 0}], {}, "expected {.classes"),
        (["road", {"id": 1, "name": "sky"}], {}, "expected {.classes"),
        ({"classes": NAMES, "num_classes": 4}, {}, "num_classes is 4, but its list has 3"),
        (NAMES, {"num_classes": 5}, r"3 classes count .*config\.data\.num_classes is 5"),
        ([*LISTED, LISTED[0]], {}, r"ids are \[0, 1, 2, 0\]"),
        ([{"id": 300, "name": "a"}], {}, r"ids are \[300\]"),
        ([{"id": "1", "name": "a"}, {"id": 0, "name": "b"}], {}, "ids are"),
        ({"classes": NAMES, "ignore_id": 256}, {}, "ignored id is 256"),
        (NAMES, {"ignore": "void"}, "ignored id is 'void'"),
        (LISTED, {"zero_is_ignored": True}, "lists 0 as a class"),
        (NAMES, {"zero_is_ignored": True, "ignore": 255}, "another id is ignored"),
        (["void"], {"ignore": 0}, "0 classes count"),
        ([str(i) for i in range(255)], {}, "255 classes, expected 254 at most"),
    ],
)
def test_other_descriptions_are_refused(meta, data, message):
    with pytest.raises(ConfigError, match=message):
        make_legend(meta, data, "meta.json")


def test_masks_are_read_as_they_are(tmp_path):
    ids = np.random.default_rng(0).integers(0, 200, (5, 7), np.uint8)
    palette = list(np.random.default_rng(1).integers(0, 256, 768))
    for content in (encoded(ids), encoded(ids, palette=palette)):
        np.testing.assert_array_equal(read_mask(content, "a"), ids)
        (tmp_path / "a.png").write_bytes(content)
        np.testing.assert_array_equal(read_mask(tmp_path / "a.png"), ids)
    black = np.array([[True, False]])
    mask = read_mask(encoded(black), "a")
    assert mask.dtype == np.uint8 and mask.tolist() == [[1, 0]]


@pytest.mark.parametrize(
    "content, message",
    [
        (encoded(np.zeros((4, 5, 3), np.uint8)), r"mode RGB \[4, 5, 3\].*one id a pixel.*colours"),
        (encoded(np.zeros((4, 5), np.uint8), "LA"), r"mode LA"),
        (encoded(np.full((4, 5), 256, np.uint16)), "ids from 256 to 256 in the mask"),
        (b"no image", "no image that can be read"),
        (encoded(np.ones((40, 50), np.uint8))[:60], "no image that can be read"),
    ],
)
def test_other_files_are_refused(content, message, tmp_path):
    with pytest.raises(ConfigError, match=f"m.png: .*{message}"):
        read_mask(content, "m.png")
    (tmp_path / "m.png").write_bytes(content)
    with pytest.raises(ConfigError, match=f"{tmp_path}/m.png: "):
        read_mask(tmp_path / "m.png")
