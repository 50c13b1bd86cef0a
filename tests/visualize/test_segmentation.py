"""The picture of a segmentation."""

import numpy as np
import pytest
from pictures import drawn

from cropr_jax.visualize import pruning, segmentation

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


def test_colors_by_hand():
    """The first classes: red, then the hues 0.618 and 0.236 of the circle, darker."""
    expected = [(1, 0, 0), (0, 0.55 * 0.29, 0.55), (0.85 * 0.58, 0.85, 0)]
    np.testing.assert_allclose(segmentation.class_colors(3), expected, atol=0.03)


@pytest.mark.parametrize(("truth", "pruned"), [(True, True), (False, True), (True, False)])
def test_figure(tmp_path, monkeypatch, truth, pruned):
    """In a row: the image, the truth and the prediction over it, and when patches were pruned."""
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((20, 30), (33, 17))]
    truths = [np.zeros(image.shape[:2], np.uint8) for image in images]
    found = [labels.copy() for labels in truths]
    for labels in truths:
        labels[-4:] = 255  # unknown
    found[0][:, 15:] = 2  # half of the pixels
    colors = random.integers(0, 256, (2, 4, 6, 3), np.uint8)
    inputs, after = colors.repeat(4, axis=1).repeat(4, axis=2), random.integers(0, 4, (2, 4, 6))
    after[:, 0, :2] = 0, 3
    picture = drawn(
        monkeypatch,
        segmentation,
        lambda path: segmentation.segmentation_figure(
            images, found, truths if truth else None, (inputs, after) if pruned else None, 5,
            NAMES, path,
        ),
        tmp_path / "a.png",
    )  # fmt: skip
    columns = 2 + truth + pruned
    share = segmentation.OVERLAY
    painted = segmentation.class_colors(3)
    for i, image in enumerate(images):
        row = picture.axes[i * columns : (i + 1) * columns]
        maps = [truths[i], found[i]] if truth else [found[i]]
        for x, y in ((2, 3), (image.shape[1] - 2, 3), (5, len(image) - 2)):
            pixel = image[y, x] / 255
            np.testing.assert_allclose(picture.color(row[0], x, y), 255 * pixel, atol=2)
            for axis, labels in zip(row[1:], maps, strict=False):
                label = labels[y, x]
                known = label < 255
                expected = share * painted[label] + (1 - share) * pixel if known else pixel
                np.testing.assert_allclose(picture.color(axis, x, y), 255 * expected, atol=2)
        if pruned:
            for column, block in enumerate(after[i, 0, :2]):
                pixel = colors[i, 0, column]
                if block:
                    grey = pixel @ np.array([0.299, 0.587, 0.114]) / 255
                    pixel = 255 * pruning.tint(pruning.block_colors(3)[block - 1], grey)
                np.testing.assert_allclose(picture.color(row[-1], 4 * column + 2, 2), pixel, atol=2)
    kept = [f"{(blocks == 0).sum()} of 24 kept" for blocks in after]
    titles = []
    for i, right in enumerate(("50%", "100%")):
        titles += ["truth", f"prediction, {right} of pixels right"] if truth else ["prediction"]
        titles += [kept[i]] if pruned else []
    assert picture.titles() == titles


def test_legend_of_the_figure(tmp_path, monkeypatch):
    """Names of the classes that occur, those of most pixels first, in their colours."""
    labels = np.zeros((4, 6), np.uint8)
    labels[0] = 255
    labels[1:, :4] = 2
    picture = drawn(
        monkeypatch,
        segmentation,
        lambda path: segmentation.segmentation_figure(
            [np.zeros((4, 6, 3), np.uint8)], [labels], None, None, 2, NAMES, path
        ),
        tmp_path / "a.png",
    )
    legend = picture.axes[-1].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["car", "sky"]
    for patch, label in zip(legend.get_patches(), (2, 0), strict=True):
        color = segmentation.class_colors(3)[label]
        np.testing.assert_allclose(patch.get_facecolor()[:3], color)
        box = patch.get_window_extent()
        middle = len(picture.pixels) - 1 - int((box.y0 + box.y1) / 2)
        shown = picture.pixels[middle, int((box.x0 + box.x1) / 2)]
        np.testing.assert_allclose(shown, 255 * color, atol=2)


def test_a_truth_without_known_pixels_gives_no_score(tmp_path, monkeypatch):
    image, unknown = np.zeros((4, 6, 3), np.uint8), np.full((4, 6), 255, np.uint8)
    picture = drawn(
        monkeypatch,
        segmentation,
        lambda path: segmentation.segmentation_figure(
            [image], [np.zeros((4, 6), np.uint8)], [unknown], None, 2, NAMES, path
        ),
        tmp_path / "a.png",
    )
    assert picture.titles() == ["truth", "prediction"]


def test_wrong_arguments(tmp_path):
    image, labels = np.zeros((4, 6, 3), np.uint8), np.zeros((4, 6), np.uint8)
    draw = segmentation.segmentation_figure
    with pytest.raises(ValueError, match="one prediction and one truth"):
        draw([image], [labels, labels], None, None, 2, NAMES, tmp_path / "a.png")
    after = (image[None], np.full((1, 2, 3), 9))
    with pytest.raises(ValueError, match="reaches 9"):
        draw([image], [labels], None, after, 2, NAMES, tmp_path / "a.png")
