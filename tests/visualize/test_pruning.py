"""The pruning picture."""

import numpy as np
import pytest
from PIL import Image

from cropr_jax.visualize import pruning


def test_kept_patches_show_the_image():
    image = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    after = np.array([[0, 1, 2], [2, 0, 1]])
    painted = pruning.paint(image, after, 2)
    assert painted.shape == (4, 6, 3) and painted.min() >= 0 and painted.max() <= 1
    kept = np.kron(after == 0, np.ones((2, 2), bool))
    np.testing.assert_array_equal(painted[kept], image[kept] / 255)
    # Two blocks differ in colour by more than the image could.
    first, second = pruning.block_colors(2)
    assert np.abs(first - second).max() * pruning.TINT > 0.7 * (1 - pruning.TINT)


def test_outline_surrounds_each_region():
    kept = np.array([[True, True, False], [False, False, True]])
    edges = {tuple(map(tuple, edge)) for edge in pruning.outline(kept)}
    assert edges == {
        ((0, 0), (1, 0)), ((1, 0), (2, 0)), ((0, 1), (1, 1)), ((1, 1), (2, 1)),
        ((0, 0), (0, 1)), ((2, 0), (2, 1)),
        ((2, 1), (3, 1)), ((2, 2), (3, 2)), ((2, 1), (2, 2)), ((3, 1), (3, 2)),
    }  # fmt: skip


@pytest.mark.parametrize(("count", "size", "grid"), [(5, (8, 8), (8, 8)), (1, (32, 48), (4, 6))])
def test_figure(tmp_path, count, size, grid):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (count, *size, 3), np.uint8)
    after = random.integers(0, 4, (count, *grid))
    path = tmp_path / "pruning.png"
    pruning.pruning_figure(images, after, 5, ["a"] * count, path)
    with Image.open(path) as file:
        picture = np.asarray(file.convert("RGB")).astype(int)
    assert picture.shape[0] > 200 and picture.std() > 20
    kept = np.abs(picture - np.array([255, 59, 31])).sum(-1) < 30
    assert kept.sum() > 100


def test_wrong_arguments(tmp_path):
    image = np.zeros((8, 8, 3), np.uint8)
    after = np.zeros((1, 4, 4), int)
    with pytest.raises(ValueError, match="no multiple of a 3 x 3 grid"):
        pruning.paint(image, np.zeros((3, 3), int), 2)
    with pytest.raises(ValueError, match=r"expected 0\.\.2"):
        pruning.paint(image, np.full((4, 4), 3), 2)
    with pytest.raises(ValueError, match="1 images, 1 maps and 2 titles"):
        pruning.pruning_figure(image[None], after, 2, ["a", "b"], tmp_path / "a.png")
    with pytest.raises(ValueError, match="reaches 9"):
        pruning.pruning_figure(image[None], after + 9, 2, ["a"], tmp_path / "a.png")
