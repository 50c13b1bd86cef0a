"""Pixels as viewers show them: EXIF's orientation, 16 bits, slivers; ids of masks as stored."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from cropr_jax.data import annotations, preprocess
from cropr_jax.data.annotations import read_mask
from cropr_jax.data.readers.segmentation_folder import open_segmentation_folder
from cropr_jax.errors import ConfigError
from cropr_jax.tasks.predictor import read


def picture(height=6, width=9):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def exif(orientation):
    made = Image.Exif()
    made[0x0112] = orientation
    return made


def encoded(pixels, format="PNG", **options):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_orientation_is_applied(format, orientation, tmp_path):
    """As Pillow's own function does it, from bytes, a file and an open image alike; once."""
    content = encoded(picture(), format, exif=exif(orientation))
    stored = Image.open(io.BytesIO(content))
    upright = np.asarray(ImageOps.exif_transpose(stored).convert("RGB"))
    assert upright.shape == ((9, 6, 3) if orientation in annotations.SIDEWAYS else (6, 9, 3))
    path = tmp_path / f"photo.{format.lower()}"
    path.write_bytes(content)
    for found in (preprocess.decode(content), read(path), read(str(path)), read(stored)):
        np.testing.assert_array_equal(found, upright)
    np.testing.assert_array_equal(preprocess.decode(preprocess.decode(content)), upright)


@pytest.mark.parametrize("value", [0, 9, 77])
def test_an_orientation_that_is_none_is_passed_over(value):
    content = encoded(picture(), exif=exif(value))
    np.testing.assert_array_equal(preprocess.decode(content), picture())


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_by_their_range(format):
    eight = np.arange(256, dtype=np.uint8).reshape(16, 16)
    sixteen = eight.astype(np.uint16) * 257
    grey = np.repeat(eight[..., None], 3, -1)
    for found in (encoded(sixteen, format), sixteen, sixteen[..., None]):
        np.testing.assert_array_equal(preprocess.decode(found), grey)
    between = np.array([[0, 128, 129, 65406, 65535]], np.uint16)
    np.testing.assert_array_equal(
        np.asarray(preprocess.decode(between))[..., 0], [[0, 0, 1, 254, 255]]
    )
    colours = np.stack([sixteen] * 3, -1)
    np.testing.assert_array_equal(preprocess.decode(colours), grey)


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_pixels_without_a_known_range_are_refused(kind, tmp_path):
    path = tmp_path / "deep.tiff"
    path.write_bytes(encoded(np.ones((4, 4), kind), "TIFF"))
    with pytest.raises(
        ConfigError, match=r"deep.tiff' cannot be read \(image has pixels of 32 bits"
    ):
        read(path)


@pytest.mark.parametrize("content", [b"", b"<html></html>", encoded(picture(64, 64))[:200]])
def test_a_file_that_is_no_image_is_one_line(content, tmp_path):
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(ConfigError, match="a.jpg' cannot be read"):
        read(tmp_path / "a.jpg")


def test_a_bomb_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    (tmp_path / "big.png").write_bytes(encoded(picture()))
    with pytest.raises(ConfigError, match="big.png' cannot be read .*bomb"):
        read(tmp_path / "big.png")


SETTINGS = {"res": (224, 224), "crop_ratio": 0.875, "interpolation": "bicubic"}


@pytest.mark.parametrize("size", [(1, 60000), (60000, 1), (3, 50001), (2, 40000)])
def test_a_sliver_is_as_cheap_as_a_photo(size, monkeypatch):
    resized = []
    real = Image.Image.resize
    monkeypatch.setattr(
        Image.Image,
        "resize",
        lambda self, new, *rest: resized.append(new) or real(self, new, *rest),
    )
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, size, np.uint8)).convert(
        "RGB"
    )
    found = preprocess.eval_image(image, SETTINGS)
    assert found.size == (224, 224) and len(resized) == 1
    assert resized[0][0] * resized[0][1] <= 17 * 256 * 256


def test_a_long_image_shows_the_same_middle():
    """Where its ends are cut off before resizing and where they are not."""
    image = Image.fromarray(picture(20, 20 * 40))
    whole = preprocess.center_crop(
        preprocess.resize_shorter_side(image, (256, 256), Image.Resampling.BICUBIC), (224, 224)
    )
    found = preprocess.eval_image(image, SETTINGS)
    assert np.abs(np.asarray(found, int) - np.asarray(whole, int)).max() <= 1
    photo = Image.fromarray(picture(30, 200))
    assert preprocess._without_ends(photo, (256, 256)) is photo


def grey_png(ids, depth):
    """A grey PNG of so many bits a pixel, written by hand: Pillow writes 1, 8 and 16 alone."""
    import struct
    import zlib

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    rows = b""
    for row in ids:
        bits = "".join(format(int(value), f"0{depth}b") for value in row)
        bits += "0" * (-len(bits) % 8)
        rows += b"\0" + int(bits, 2).to_bytes(len(bits) // 8, "big")
    head = struct.pack(">IIBBBBB", len(ids[0]), len(ids), depth, 0, 0, 0, 0)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(("depth", "most"), [(1, 1), (2, 3), (4, 15), (8, 255), (16, 255)])
def test_ids_are_those_that_are_stored(depth, most):
    ids = np.arange(35).reshape(5, 7) % (most + 1)
    ids[-1, -1] = most
    found = read_mask(grey_png(ids, depth))
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, ids)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_ids_of_palettes_stay_as_they_are(bits):
    ids = (np.arange(35).reshape(5, 7) % 2**bits).astype(np.uint8)
    image = Image.fromarray(ids, "P") if bits == 8 else Image.fromarray(ids).convert("P")
    image.putdata(ids.ravel())
    image.putpalette([value for index in range(256) for value in (index, 0, 0)])
    buffer = io.BytesIO()
    image.save(buffer, "PNG", bits=bits)
    np.testing.assert_array_equal(read_mask(buffer.getvalue()), ids)


def test_ids_beyond_a_byte_are_refused():
    with pytest.raises(
        ConfigError, match="mask.png: ids from 0 to 300 in the mask, expected 0 to 2"
    ):
        read_mask(grey_png([[0, 300]], 16), "mask.png")


def folder(path, image_turn, mask_turn, size=(6, 9), mask_size=None):
    for name in ("images", "labels"):
        (path / name / "train").mkdir(parents=True)
    (path / "meta.json").write_text('{"classes": ["a", "b"]}')
    content = encoded(picture(*size), "PNG", exif=exif(image_turn))
    (path / "images" / "train" / "0.png").write_bytes(content)
    ids = (picture(*(mask_size or size))[..., 0] > 127).astype(np.uint8)
    info = {"exif": exif(mask_turn)} if mask_turn else {"pnginfo": PngImagePlugin.PngInfo()}
    (path / "labels" / "train" / "0.png").write_bytes(encoded(ids, "PNG", **info))
    return path, ids


def test_image_and_mask_are_turned_alike(tmp_path):
    path, ids = folder(tmp_path, 6, 6)
    opened = open_segmentation_folder(path, "train", {})
    content, labels = opened(0)
    assert preprocess.decode(content).size == labels.shape[::-1] == (6, 9)
    np.testing.assert_array_equal(labels, np.rot90(ids, -1))
    assert opened.largest() == (9, 6)


@pytest.mark.parametrize("turn", [5, 6, 7, 8])
def test_a_mask_that_was_drawn_on_the_upright_photo(turn, tmp_path):
    path, ids = folder(tmp_path, turn, 0, mask_size=(9, 6))
    content, labels = open_segmentation_folder(path, "train", {})(0)
    assert preprocess.decode(content).size == labels.shape[::-1]
    np.testing.assert_array_equal(labels, ids)


@pytest.mark.parametrize(("turns", "size", "mask_size"), [
    ((6, 0), (6, 6), None),  # square: nothing tells
    ((3, 0), (6, 9), None),  # upside down: nothing tells either
    ((6, 0), (6, 9), None),  # the mask lies as the photo is stored
    ((1, 6), (6, 9), None),
    ((6, 8), (6, 9), None),
])  # fmt: skip
def test_photos_and_masks_that_may_lie_askew_are_refused(turns, size, mask_size, tmp_path):
    path, _ = folder(tmp_path, *turns, size, mask_size)
    with pytest.raises(
        ConfigError, match=r"0.png: EXIF says orientation . of its mask|orientation"
    ):
        open_segmentation_folder(path, "train", {})
