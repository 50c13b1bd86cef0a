"""RandAugment: parsing, magnitudes at m = 9, every operation, how operations are drawn."""

import collections

import numpy as np
import pytest
from PIL import Image, ImageOps

from cropr_jax.data import rand_augment
from cropr_jax.errors import ConfigError

FILL = (124, 116, 104)
POLICY = "rand-m9-mstd0.5-inc1"


def picture(height=24, width=32, seed=0):
    values = np.random.default_rng(seed).integers(30, 220, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def apply(name, argument, image=None):
    return np.asarray(rand_augment.OPS[name](image or picture(), argument, FILL)).astype(int)


def test_parse():
    assert rand_augment.parse_policy(POLICY) == rand_augment.Policy(9.0, 0.5, 2, 0.5)
    parsed = rand_augment.parse_policy("rand-m5-n3-p0.7-inc1")
    assert parsed == rand_augment.Policy(5.0, 0.0, 3, 0.7)


@pytest.mark.parametrize(
    "text", ["rand-m9", "augmix-m9-inc1", "rand-inc1", "rand-m11-inc1", "rand-m9-inc1-wild", "x"]
)
def test_bad_policy_names_the_field(text):
    with pytest.raises(ConfigError, match=r"config\.preprocess\.train\.rand_augment"):
        rand_augment.parse_policy(text)


@pytest.mark.parametrize(
    "name, plus, minus",
    [
        ("AutoContrast", None, None),
        ("Equalize", None, None),
        ("Invert", None, None),
        ("Rotate", 27.0, -27.0),
        ("PosterizeIncreasing", 1, 1),
        ("SolarizeIncreasing", 26, 26),
        ("SolarizeAdd", 99, 99),
        ("ColorIncreasing", 1.81, 0.19),
        ("ContrastIncreasing", 1.81, 0.19),
        ("BrightnessIncreasing", 1.81, 0.19),
        ("SharpnessIncreasing", 1.81, 0.19),
        ("ShearX", 0.27, -0.27),
        ("ShearY", 0.27, -0.27),
        ("TranslateXRel", 0.405, -0.405),
        ("TranslateYRel", 0.405, -0.405),
    ],
)
def test_arguments_at_magnitude_nine(name, plus, minus):
    argument = rand_augment.ARGUMENTS[name]
    for sign, expected in ((1.0, plus), (-1.0, minus)):
        found = argument(9.0, sign)
        assert found is None if expected is None else found == pytest.approx(expected)


def test_fifteen_operations_with_arguments():
    assert len(rand_augment.OPS) == 15
    assert rand_augment.OPS.keys() == rand_augment.ARGUMENTS.keys()


@pytest.mark.parametrize("bits", [0, 1, 4])
def test_posterize_masks_low_bits(bits):
    image = np.asarray(picture()).astype(int)
    expected = image // 2 ** (8 - bits) * 2 ** (8 - bits)
    np.testing.assert_array_equal(apply("PosterizeIncreasing", bits), expected)


def test_pointwise_operations_by_hand():
    image = np.asarray(picture()).astype(int)
    np.testing.assert_array_equal(apply("Invert", None), 255 - image)
    solarized = np.where(image >= 26, 255 - image, image)
    np.testing.assert_array_equal(apply("SolarizeIncreasing", 26), solarized)
    added = np.where(image < 128, np.minimum(image + 99, 255), image)
    np.testing.assert_array_equal(apply("SolarizeAdd", 99), added)
    np.testing.assert_allclose(apply("BrightnessIncreasing", 0.19), image * 0.19, atol=1)
    np.testing.assert_allclose(
        apply("BrightnessIncreasing", 1.81), np.clip(image * 1.81, 0, 255), atol=1
    )


def test_enhancements_blend_with_their_degenerate_image():
    image = np.asarray(picture()).astype(float)
    grey = np.asarray(picture().convert("L")).astype(float)
    for factor in (0.19, 1.81):
        color = np.clip(grey[..., None] + factor * (image - grey[..., None]), 0, 255)
        np.testing.assert_allclose(apply("ColorIncreasing", factor), color, atol=1)
        mean = int(grey.mean() + 0.5)
        contrast = np.clip(mean + factor * (image - mean), 0, 255)
        np.testing.assert_allclose(apply("ContrastIncreasing", factor), contrast, atol=1)
    # Smoothed with [[1, 1, 1], [1, 5, 1], [1, 1, 1]] / 13, the border kept.
    rows, columns = image.shape[:2]
    smooth = image.copy()
    window = sum(
        image[1 + i : rows - 1 + i, 1 + j : columns - 1 + j] for i in (-1, 0, 1) for j in (-1, 0, 1)
    )
    smooth[1:-1, 1:-1] = (window + 4 * image[1:-1, 1:-1]) / 13
    sharp = np.clip(smooth + 1.81 * (image - smooth), 0, 255)
    np.testing.assert_allclose(apply("SharpnessIncreasing", 1.81), sharp, atol=2)


def test_histogram_operations_work_by_channel():
    image = np.asarray(picture()).astype(float)
    low, high = image.min((0, 1)), image.max((0, 1))
    np.testing.assert_allclose(
        apply("AutoContrast", None), (image - low) * 255 / (high - low), atol=1
    )
    channels = [ImageOps.equalize(channel) for channel in picture().split()]
    expected = np.stack([np.asarray(channel) for channel in channels], -1)
    np.testing.assert_array_equal(apply("Equalize", None), expected)


def test_geometry_moves_pixels_the_stated_way_and_fills_with_the_mean():
    image = np.asarray(picture()).astype(int)
    right = apply("TranslateXRel", 0.25)  # output x shows input x + 8
    np.testing.assert_allclose(right[:, :23], image[:, 8:31], atol=1)
    assert (right[:, 25:] == FILL).all()
    down = apply("TranslateYRel", -0.25)  # output y shows input y - 6
    np.testing.assert_allclose(down[7:], image[1:18], atol=1)
    assert (down[:5] == FILL).all()
    # Constant image: only where it is filled shows how it was sheared.
    flat = Image.new("RGB", (32, 24), (10, 20, 30))
    filled = (apply("ShearX", 0.5, flat) == FILL).all(-1).sum(1)
    assert filled[0] <= 1 and abs(filled[-1] - 12) <= 1, "ShearX keeps the top row in place"
    filled = (apply("ShearY", 0.5, flat) == FILL).all(-1).sum(0)
    assert filled[0] <= 1 and abs(filled[-1] - 16) <= 1, "ShearY keeps the left column in place"
    corner = np.zeros((25, 25, 3), np.uint8)
    corner[:12, :12] = 255
    turned = apply("Rotate", 90.0, Image.fromarray(corner))
    assert turned[20, 4].tolist() == [255] * 3, "counter-clockwise about the centre"


def test_draws_two_operations_each_with_probability_one_half(monkeypatch):
    calls, magnitudes = [], []

    def record(name):
        return lambda image, argument, fill: calls.append(name) or image

    for name in rand_augment.OPS:
        monkeypatch.setitem(rand_augment.OPS, name, record(name))
    monkeypatch.setitem(
        rand_augment.ARGUMENTS, "Invert", lambda m, sign: magnitudes.append((m, sign))
    )
    rng = np.random.default_rng(0)
    policy = rand_augment.parse_policy(POLICY)
    for _ in range(15_000):
        rand_augment.rand_augment(picture(2, 2), policy, FILL, rng)
    counts = collections.Counter(calls)
    assert len(counts) == 15
    for count in counts.values():
        assert abs(count - 1000) < 150
    m, sign = np.array(magnitudes).T
    assert m.max() == 10.0 and abs(m.mean() - 9) < 0.1 and abs(m.std() - 0.5) < 0.1
    assert abs(sign.mean()) < 0.15


@pytest.mark.parametrize("name", rand_augment.OPS)
@pytest.mark.parametrize("magnitude", [0.0, 9.0, 10.0])
def test_every_operation_works_on_tiny_images(name, magnitude):
    for sign in (1.0, -1.0):
        argument = rand_augment.ARGUMENTS[name](magnitude, sign)
        for size in ((1, 1), (8, 8)):
            image = picture(*size)
            assert rand_augment.OPS[name](image, argument, FILL).size == image.size
