"""Decoding, the evaluation transform (exact with the released code), the training transform."""

import io

import numpy as np
import pytest
from conftest import fixture_names, load_fixture
from PIL import Image

from cropr_jax.data import preprocess
from cropr_jax.errors import ConfigError


def fields(**changes):
    return {
        "res": (32, 32),
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "interpolation": "bicubic",
        "crop_ratio": 0.875,
        "train": {
            "crop_scale": (0.08, 1.0),
            "flip": True,
            "rand_augment": "rand-m9-mstd0.5-inc1",
            "erase": 0.25,
        },
        **changes,
    }


def pixels(height, width, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def encoded(image, kind, **options):
    file = io.BytesIO()
    Image.fromarray(image).save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("eval_transform"))
def test_eval_transform_matches_the_released_code(name):
    arrays, meta = load_fixture(name)
    config = meta["config"]
    for case in config["cases"]:
        number, size = case["image"], case["img_size"]
        key = f"{number}.{size}"
        # The released code resizes to 256/224 of the input up to 224 pixels, else to the input.
        setting = fields(
            res=(size, size),
            crop_ratio=0.875 if size <= 224 else 1.0,
            mean=config["mean"],
            std=config["std"],
        )
        image = arrays[f"in/image.{number}"]
        cropped = preprocess.eval_image(preprocess.decode(image), setting)
        np.testing.assert_array_equal(np.asarray(cropped), arrays[f"out/uint8.{key}"])
        result = preprocess.eval_transform(setting)({"image": image})
        assert result.dtype == np.float32
        whole, corner = f"out/normalized.{key}", f"out/normalized_corner.{key}"
        expected = arrays[whole] if whole in arrays else arrays[corner]
        part = result[: expected.shape[1], : expected.shape[2]].transpose(2, 0, 1)
        np.testing.assert_allclose(part, expected, atol=1e-6)


def test_decode_reads_files_and_arrays():
    image = pixels(20, 30)
    np.testing.assert_array_equal(preprocess.decode(encoded(image, "PNG")), image)
    np.testing.assert_array_equal(preprocess.decode(image), image)
    grey = image[..., :1]
    for form in (grey, grey[..., 0], encoded(grey[..., 0], "PNG")):
        np.testing.assert_array_equal(preprocess.decode(form), np.repeat(grey, 3, -1))
    jpeg = io.BytesIO()
    Image.fromarray(image).convert("CMYK").save(jpeg, "JPEG")
    assert preprocess.decode(jpeg.getvalue()).mode == "RGB"


@pytest.mark.parametrize("bad", [np.zeros((4, 4, 3), np.float32), np.zeros((4, 4, 2), np.uint8)])
def test_decode_refuses_other_arrays(bad):
    with pytest.raises(ValueError, match="expected uint8"):
        preprocess.decode(bad)


@pytest.mark.parametrize(
    "size, res, expected",
    [
        ((61, 83), (73, 73), (73, 99)),
        ((120, 97), (73, 73), (90, 73)),
        ((100, 100), (40, 80), (80, 80)),  # wide output from a square: the width decides
        ((100, 100), (80, 40), (80, 80)),
        ((50, 200), (40, 80), (40, 160)),
        ((200, 50), (40, 80), (320, 80)),
    ],
)
def test_resize_covers_the_output(size, res, expected):
    image = Image.fromarray(pixels(*size))
    result = preprocess.resize_shorter_side(image, res, Image.Resampling.BICUBIC)
    assert (result.height, result.width) == expected


@pytest.mark.parametrize("res", [(32, 32), (24, 48), (48, 24)])
@pytest.mark.parametrize("size", [(8, 8), (37, 91), (91, 37), (48, 48)])
def test_transforms_return_the_asked_size(res, size):
    record = {"image": pixels(*size)}
    for crop_ratio in (0.875, 1.0):
        setting = fields(res=res, crop_ratio=crop_ratio)
        assert preprocess.eval_transform(setting)(record).shape == (*res, 3)
        result = preprocess.train_transform(setting)(record, np.random.default_rng(0))
        assert result.shape == (*res, 3) and result.dtype == np.float32


def test_no_resize_takes_pixels_as_they_are():
    image = pixels(227, 227)
    setting = fields(res=(224, 224), crop_ratio="none", mean=(0, 0, 0), std=(1, 1, 1))
    result = preprocess.eval_transform(setting)({"image": image})
    # round(1.5) = 2 in Python and so in torchvision.
    np.testing.assert_allclose(result * 255, image[2:226, 2:226], atol=1e-3)
    with pytest.raises(ValueError, match="crop_ratio"):
        preprocess.eval_transform(setting)({"image": pixels(64, 300)})


def test_training_without_augmentation_is_the_evaluation_transform():
    off = {"crop_scale": None, "flip": False, "rand_augment": "", "erase": 0.0}
    record = {"image": pixels(50, 60)}
    setting = fields(train=off)
    result = preprocess.train_transform(setting)(record, np.random.default_rng(0))
    np.testing.assert_array_equal(result, preprocess.eval_transform(setting)(record))


def test_training_is_a_pure_function_of_record_and_generator():
    transform = preprocess.train_transform(fields())
    record = {"image": encoded(pixels(60, 80), "JPEG", quality=90)}
    first, second, other = (transform(record, np.random.default_rng(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()


@pytest.mark.parametrize(
    "change, field",
    [
        ({"interpolation": "cubic"}, "interpolation"),
        ({"crop_ratio": 2.0}, "crop_ratio"),
        ({"res": (224,)}, "res"),
        ({"res": 224}, "res"),
        ({"mean": (0.5,)}, "mean"),
    ],
)
def test_bad_fields_are_named(change, field):
    for make in (preprocess.eval_transform, preprocess.train_transform):
        with pytest.raises(ConfigError, match=rf"config\.preprocess\.{field}"):
            make(fields(**change))
