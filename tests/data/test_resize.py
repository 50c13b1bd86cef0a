"""Resizing against OpenCV's numbers, and windows of the result."""

import numpy as np
import pytest

from cropr_jax.data import resize

# OpenCV 4's results for an image that is [4, 5, 3] of (37 i) modulo 256, first channel.
IMAGE = (np.arange(4 * 5 * 3).reshape(4, 5, 3) * 37 % 256).astype(np.uint8)
LARGER = [
    [0, 37, 98, 160, 222, 141, 89, 151, 188],
    [15, 52, 114, 135, 146, 116, 104, 166, 203],
    [40, 77, 139, 94, 24, 76, 129, 191, 228],
    [65, 102, 163, 111, 31, 92, 139, 130, 125],
    [89, 126, 187, 136, 55, 117, 150, 69, 21],
    [113, 151, 212, 160, 80, 141, 174, 94, 45],
    [129, 166, 228, 175, 95, 157, 190, 109, 61],
]
SMALLER = [
    [[59, 96, 133], [116, 25, 62], [172, 124, 76]],
    [[145, 139, 133], [74, 111, 148], [88, 125, 119]],
]


def test_bilinear_is_opencvs_to_the_last_bit():
    larger = resize.bilinear(IMAGE, (7, 9), (0, 0, 7, 9))
    assert larger.dtype == np.uint8 and larger[..., 0].tolist() == LARGER
    assert resize.bilinear(IMAGE, (2, 3), (0, 0, 2, 3)).tolist() == SMALLER
    np.testing.assert_array_equal(resize.bilinear(IMAGE, (4, 5), (0, 0, 4, 5)), IMAGE)


def test_nearest_is_opencvs():
    labels = np.arange(20, dtype=np.uint8).reshape(4, 5)
    larger = resize.nearest(labels, (7, 9), (0, 0, 7, 9))
    expected = labels[[0, 0, 1, 1, 2, 2, 3]][:, [0, 0, 1, 1, 2, 2, 3, 3, 4]]
    np.testing.assert_array_equal(larger, expected)
    np.testing.assert_array_equal(
        resize.nearest(labels, (2, 3), (0, 0, 2, 3)), [[0, 1, 3], [10, 11, 13]]
    )


@pytest.mark.parametrize("size", [(7, 9), (2, 3), (4, 5), (1, 30)])
def test_a_window_is_that_part_of_the_whole(size):
    rng = np.random.default_rng(0)
    labels = IMAGE[..., 0]
    for _ in range(10):
        height, width = rng.integers(1, size[0], endpoint=True), rng.integers(1, size[1] + 1)
        top, left = rng.integers(0, size[0] - height + 1), rng.integers(0, size[1] - width + 1)
        window = tuple(map(int, (top, left, height, width)))
        part = (slice(top, top + height), slice(left, left + width))
        for make, source in ((resize.bilinear, IMAGE), (resize.nearest, labels)):
            whole = make(source, size, resize.whole(size))
            np.testing.assert_array_equal(make(source, size, window), whole[part])


@pytest.mark.parametrize(
    "size, res, expected",
    [
        ((683, 512), (512, 512), (512, 384)),
        ((100, 200), (512, 512), (256, 512)),  # small images grow too
        ((360, 480), (176, 240), (176, 235)),  # the height decides
        ((480, 360), (176, 240), (176, 132)),
        ((3, 3000), (64, 64), (1, 64)),
        ((64, 64), (64, 64), (64, 64)),
        ((37, 50), (32, 32), (24, 32)),
    ],
)
def test_fitted_lies_inside_and_touches(size, res, expected):
    assert resize.fitted(size, res) == expected
