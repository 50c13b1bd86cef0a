"""The picture of a segmentation."""

import numpy as np
import pytest
from PIL import Image

from cropr_jax.visualize import segmentation

NAMES = ("sky", "road", "car")


def test_colors_of_many_classes_differ():
    colors = segmentation.class_colors(150)
    apart = np.abs(colors[:, None] - colors[None]).max(-1)
    assert apart[~np.eye(150, dtype=bool)].min() > 0.005
    near = np.abs(np.diff(colors, axis=0)).max(-1)
    assert near.min() > 0.3


def test_ignored_pixels_show_the_image():
    image = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    labels = np.full((4, 6), 255, np.uint8)
    labels[0] = 2
    painted = segmentation.overlay(image, labels, 3)
    np.testing.assert_array_equal(painted[1:], image[1:] / 255)
    share = segmentation.OVERLAY
    expected = share * segmentation.class_colors(3)[2] + (1 - share) * image[0] / 255
    np.testing.assert_allclose(painted[0], expected)


@pytest.mark.parametrize(("truth", "pruned"), [(True, True), (False, True), (True, False)])
def test_figure(tmp_path, truth, pruned):
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((20, 30), (33, 17))]
    found = [random.integers(0, 3, image.shape[:2]).astype(np.uint8) for image in images]
    inputs = random.integers(0, 256, (2, 16, 24, 3), np.uint8)
    maps = (inputs, random.integers(0, 4, (2, 4, 6))) if pruned else None
    path = tmp_path / "a.png"
    segmentation.segmentation_figure(images, found, found if truth else None, maps, 5, NAMES, path)
    with Image.open(path) as file:
        picture = np.asarray(file.convert("RGB")).astype(int)
    assert picture.std() > 20
    kept = np.abs(picture - np.array([255, 59, 31])).sum(-1) < 30
    assert kept.sum() > 100 or not pruned


def test_wrong_arguments(tmp_path):
    image, labels = np.zeros((4, 6, 3), np.uint8), np.zeros((4, 6), np.uint8)
    draw = segmentation.segmentation_figure
    with pytest.raises(ValueError, match="one prediction and one truth"):
        draw([image], [labels, labels], None, None, 2, NAMES, tmp_path / "a.png")
    after = (image[None], np.full((1, 2, 3), 9))
    with pytest.raises(ValueError, match="reaches 9"):
        draw([image], [labels], None, after, 2, NAMES, tmp_path / "a.png")
