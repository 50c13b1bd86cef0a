"""The pruning picture."""

import numpy as np
import pytest
from pictures import drawn

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


def test_a_patch_has_the_colour_of_its_block():
    """By hand: of a grey pixel of 51 / 255, in the first and in the last of three blocks."""
    image = np.full((2, 6, 3), 51, np.uint8)
    painted = pruning.paint(image, np.array([[1, 0, 3]]), 3)
    grey = 0.25 * (0.3 + 0.7 * 0.2)
    dark, bright = (0.267004, 0.004874, 0.329415), (0.993248, 0.906157, 0.143936)  # viridis
    np.testing.assert_allclose(painted[:, :2], np.full((2, 2, 3), 0.75 * np.array(dark) + grey))
    np.testing.assert_allclose(painted[:, 2:4], 0.2)
    np.testing.assert_allclose(painted[:, 4:], np.full((2, 2, 3), 0.75 * np.array(bright) + grey))


@pytest.mark.parametrize(("count", "patch", "grid"), [(5, (1, 1), (4, 4)), (2, (8, 8), (4, 6))])
def test_figure(tmp_path, monkeypatch, count, patch, grid):
    """Each image as it is; beside it kept patches as they are, others by their block."""
    random = np.random.default_rng(0)
    colors = random.integers(0, 256, (count, *grid, 3), np.uint8)
    images = colors.repeat(patch[0], axis=1).repeat(patch[1], axis=2)
    after = random.integers(0, 4, (count, *grid))
    after[0, 0, :3] = 0, 1, 2
    names = [f"image {i}" for i in range(count)]
    picture = drawn(
        monkeypatch,
        pruning,
        lambda path: pruning.pruning_figure(images, after, 5, names, path),
        tmp_path / "pruning.png",
    )
    kept = (after == 0).sum((1, 2))
    expected = [[name, f"{k} of {after[0].size} kept"] for name, k in zip(names, kept, strict=True)]
    assert picture.titles() == sum(expected, [])
    titled = [axis for axis in picture.axes if axis.get_title(loc="left")]
    for i in range(count):
        left, right = titled[2 * i : 2 * i + 2]
        for row, column in np.ndindex(grid):
            place = (column + 0.5) * patch[1], (row + 0.5) * patch[0]
            pixel, block = colors[i, row, column], after[i, row, column]
            np.testing.assert_allclose(picture.color(left, *place), pixel, atol=2)
            if block:
                grey = pixel @ np.array([0.299, 0.587, 0.114]) / 255
                pixel = 255 * pruning.tint(pruning.block_colors(3)[block - 1], grey)
            np.testing.assert_allclose(picture.color(right, *place), pixel, atol=2)
    # A line is drawn between a kept patch and a pruned one, not between two pruned ones.
    edges = [picture.around(titled[1], side * patch[1], patch[0] / 2) for side in (1, 2)]
    near = [(np.abs(edge - np.array([255, 59, 31])).max(-1) < 40).any() for edge in edges]
    assert near == [True, False]


def test_legend_of_the_figure(tmp_path, monkeypatch):
    """The last block is the last one that pruned anything; all colours are those of the map."""
    after = np.array([[[0, 4], [2, 1]]])
    picture = drawn(
        monkeypatch,
        pruning,
        lambda path: pruning.pruning_figure(
            np.full((1, 4, 4, 3), 128, np.uint8), after, 12, ["a"], path
        ),
        tmp_path / "pruning.png",
    )
    bar, mark = picture.axes[-2:]
    assert [label.get_text() for label in bar.get_xticklabels()] == ["1", "2", "3", "4"]
    assert bar.get_xlabel() == "pruned after block"
    assert [text.get_text() for text in mark.get_legend().get_texts()] == ["kept"]
    # Of a pixel of that grey the map has the very colours of the legend.
    axis = picture.axes[1]
    for block, place in ((4, (3, 1)), (2, (1, 3)), (1, (3, 3))):
        shown = picture.color(bar, block, 0.5)
        np.testing.assert_allclose(picture.color(axis, *place), shown, atol=2)


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
