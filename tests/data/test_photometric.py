"""Hue, saturation and value against OpenCV's; the four distortions and how often they come."""

import numpy as np
import pytest

from cropr_jax.data import photometric

# RGB and OpenCV 4's COLOR_RGB2HSV of it.
COLOURS = {
    (0, 0, 0): (0, 0, 0),
    (255, 255, 255): (0, 0, 255),
    (255, 0, 0): (0, 255, 255),
    (0, 255, 0): (60, 255, 255),
    (0, 0, 255): (120, 255, 255),
    (200, 100, 50): (10, 191, 200),
    (12, 200, 199): (90, 240, 200),
    (90, 30, 200): (131, 217, 200),
    (1, 2, 3): (105, 170, 3),
    (250, 251, 249): (45, 2, 251),
    (128, 0, 127): (150, 255, 128),
}
# HSV and OpenCV 4's COLOR_HSV2RGB, one pixel at a time: its code for many rounds down.
BACK = {
    (30, 128, 200): (200, 200, 100),
    (59, 77, 180): (127, 180, 126),
    (90, 255, 10): (0, 10, 10),
    (119, 3, 250): (247, 247, 250),
    (121, 200, 77): (19, 17, 77),
    (150, 50, 50): (50, 40, 50),
    (179, 254, 254): (254, 1, 9),
}


def random_image(seed=0):
    return np.random.default_rng(seed).integers(0, 256, (20, 30, 3), np.uint8)


def test_hsv_is_opencvs():
    image = np.array(list(COLOURS), np.uint8)[None]
    found = np.stack(photometric.rgb_to_hsv(image), -1)
    np.testing.assert_array_equal(found[0], list(COLOURS.values()))
    hsv = np.array(list(BACK))
    np.testing.assert_array_equal(photometric.hsv_to_rgb(*hsv.T), list(BACK.values()))


def test_there_and_back_loses_little():
    image = random_image()
    back = photometric.hsv_to_rgb(*photometric.rgb_to_hsv(image))
    # A hue of two degrees is 255 / 30 levels wide; half of it is lost at most, and saturation.
    assert np.abs(back.astype(int) - image).max() <= 5
    grey = np.repeat(image[..., :1], 3, -1)
    np.testing.assert_array_equal(photometric.hsv_to_rgb(*photometric.rgb_to_hsv(grey)), grey)


def test_saturation_and_hue_change_what_they_say():
    image = np.array([[[200, 100, 100], [90, 90, 90]]], np.uint8)
    # A saturation of 127 becomes 63, as half a step is cut: 200 (1 - 63/255).
    np.testing.assert_array_equal(
        photometric.scale_saturation(image, 0.5), [[[200, 151, 151], [90, 90, 90]]]
    )
    # 60 steps of two degrees turn red to green; what goes beyond 255 is cut.
    np.testing.assert_array_equal(
        photometric.shift_hue(image, 60), [[[100, 200, 100], [90, 90, 90]]]
    )
    np.testing.assert_array_equal(
        photometric.shift_hue(image, -120), photometric.shift_hue(image, 60)
    )
    assert photometric.scale_saturation(image, 100.0)[0, 0].tolist() == [200, 0, 0]


@pytest.mark.parametrize(
    "factor, offset, expected",
    [(1.0, 32.0, [32, 132, 255]), (1.5, 0.0, [0, 150, 255]), (0.555, -3.3, [0, 52, 138])],
)
def test_results_are_clipped_and_cut_to_integers(factor, offset, expected):
    image = np.array([0, 100, 255], np.uint8)
    assert photometric._linear(image, factor, offset).tolist() == expected


def test_brightness_and_contrast_come_half_the_time_and_in_their_ranges():
    # Grey has no hue and no saturation.
    grey = np.full((1, 1, 3), 100, np.uint8)
    found = np.array(
        [photometric.distort(grey, np.random.default_rng(seed))[0, 0] for seed in range(4000)]
    )
    assert (found == found[:, :1]).all()
    found = found[:, 0]
    assert 0.24 < (found == 100).mean() < 0.28, "neither of the two: a quarter"
    assert 34 <= found.min() < 38 and 192 < found.max() <= 198, "(100 -+ 32) x (0.5 to 1.5)"
    black = [
        photometric.distort(np.zeros((1, 1, 3), np.uint8), np.random.default_rng(seed)).max()
        for seed in range(1500)
    ]
    assert 40 < max(black) <= 48, "32 x 1.5: contrast comes after brightness"


def test_every_part_is_left_out_half_the_time():
    image = random_image()
    changed = [
        (photometric.distort(image, np.random.default_rng(seed)) != image).any()
        for seed in range(400)
    ]
    # Nothing happens where all four coins say no: 1 in 16.
    assert 0.91 < np.mean(changed) < 0.965
    one, two = (photometric.distort(image, np.random.default_rng(3)) for _ in range(2))
    np.testing.assert_array_equal(one, two)
    assert one.dtype == np.uint8 and one.shape == image.shape
