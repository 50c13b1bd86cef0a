"""Geometry and distributions of crop, flip and erasing."""

import numpy as np
import pytest
from PIL import Image

from cropr_jax.data import augment


def picture(height=40, width=60, seed=0):
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def test_crop_area_and_ratio_have_timms_distribution():
    rng = np.random.default_rng(0)
    boxes = np.array([augment.crop_box((500, 500), (0.08, 1.0), rng) for _ in range(20_000)])
    areas = boxes[:, 2] * boxes[:, 3] / 500**2
    # Deciles of timm's sampler on a square image.
    np.testing.assert_allclose(np.quantile(areas, [0.1, 0.5, 0.9]), [0.16, 0.48, 0.80], atol=0.02)
    ratios = np.log(boxes[:, 3] / boxes[:, 2])
    assert abs(ratios.mean()) < 0.01
    assert np.all(np.abs(ratios) < np.log(4 / 3) + 0.05)
    assert np.all(boxes[:, 0] + boxes[:, 2] <= 500) and np.all(boxes[:, 1] + boxes[:, 3] <= 500)


@pytest.mark.parametrize(
    "size, expected",
    [
        ((10, 100), (0, 43, 10, 13)),  # too wide: ratio 4/3
        ((100, 10), (43, 0, 13, 10)),  # too tall: ratio 3/4
        ((10, 12), (0, 0, 10, 12)),
    ],
)
def test_crop_falls_back_to_the_centre(size, expected):
    class Never(np.random.Generator):
        """Draws the whole area, which fits no image of another ratio."""

        def uniform(self, low, high):
            return 50.0 if low > 0 else 0.0

    assert augment.crop_box(size, (0.5, 1.0), Never(np.random.PCG64(0))) == expected


def test_random_resized_crop_is_pillows_crop_and_resize():
    image = picture()
    result = augment.random_resized_crop(
        image, (24, 32), (0.08, 1.0), Image.Resampling.BICUBIC, np.random.default_rng(3)
    )
    top, left, h, w = augment.crop_box((40, 60), (0.08, 1.0), np.random.default_rng(3))
    expected = image.crop((left, top, left + w, top + h)).resize((32, 24), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (8, 8)])
def test_tiny_images_survive(size):
    for seed in range(50):
        rng = np.random.default_rng(seed)
        image = augment.random_resized_crop(
            picture(*size), (8, 8), (0.08, 1.0), Image.Resampling.BICUBIC, rng
        )
        pixels = augment.random_erasing(np.asarray(image, np.float32), 1.0, rng)
        assert pixels.shape == (8, 8, 3)


def test_flip_mirrors_half_of_the_time():
    image = picture()
    mirrored = np.asarray(image)[:, ::-1]
    rng = np.random.default_rng(0)
    flips = 0
    for _ in range(400):
        result = np.asarray(augment.random_flip(image, rng))
        flips += int((result == mirrored).all())
        assert (result == mirrored).all() or (result == np.asarray(image)).all()
    assert 160 < flips < 240


def test_erase_box_rules():
    rng = np.random.default_rng(0)
    boxes = [augment.erase_box((100, 80), rng) for _ in range(5000)]
    boxes = np.array([box for box in boxes if box is not None])
    assert len(boxes) > 4990
    top, left, h, w = boxes.T
    assert np.all(h < 100) and np.all(w < 80)
    assert np.all(top + h <= 100) and np.all(left + w <= 80)
    areas = h * w / 8000
    assert areas.min() > 0.015 and areas.max() < 1 / 3 + 0.01
    aspects = h / w
    assert aspects.min() > 0.25 and aspects.max() < 4.0


def test_erasing_fills_one_box_with_noise_and_leaves_the_rest():
    image = np.full((64, 64, 3), 7.0, np.float32)
    noise = []
    for seed in range(40):
        result = augment.random_erasing(image, 1.0, np.random.default_rng(seed))
        changed = (result != 7.0).all(-1)
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        assert changed[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        assert changed.sum() == len(rows) * len(columns)
        noise.append(result[changed].ravel())
    values = np.concatenate(noise)
    assert abs(values.mean()) < 0.02 and abs(values.std() - 1) < 0.02
    assert (image == 7.0).all(), "the input was written to"


def test_erasing_probability():
    image = np.zeros((16, 16, 3), np.float32)
    rng = np.random.default_rng(0)
    erased = sum(augment.random_erasing(image, 0.25, rng) is not image for _ in range(2000))
    assert 430 < erased < 570
    assert augment.random_erasing(image, 0.0, rng) is image
