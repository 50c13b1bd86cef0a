"""Losses and exact metrics of segmentation, against NumPy and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import fixture_names, load_fixture
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cropr_jax.data.records import IGNORE
from cropr_jax.data.segmentation import window_corners
from cropr_jax.tasks.segmentation import evaluation as segmentation
from cropr_jax.tasks.segmentation.evaluation import MeanIoU
from cropr_jax.tasks.segmentation.task import Segmentation, make_targets

TASK = Segmentation()
evaluation_sums = jax.jit(segmentation.evaluation_sums)
label_maps = jax.jit(segmentation.label_maps, static_argnums=(1, 3))
by_rows = jax.jit(segmentation.by_rows, static_argnums=(0, 2, 4))


def interpolate(length, size):
    """[size, length]: PyTorch's bilinear rule along one axis, written out."""
    matrix = np.zeros((size, length))
    for row in range(size):
        place = max((row + 0.5) * length / size - 0.5, 0.0)
        low = min(int(place), length - 1)
        high = min(low + 1, length - 1)
        matrix[row, low] += 1 - (place - low)
        matrix[row, high] += place - low
    return matrix


def one_shot(resized, size):
    """Places of images that are seen once."""
    corner = jnp.zeros((len(size), 1, 2), jnp.int32)
    return segmentation.Places(corner, jnp.asarray(resized), jnp.asarray(size))


def two_steps(logits, padded, valid, size):
    """The protocol as it is written: grow to the input, cut the padding, resize to the image."""
    grown = np.einsum("yh,hwc,xw->yxc", interpolate(logits.shape[0], padded[0]), logits,
                      interpolate(logits.shape[1], padded[1]))  # fmt: skip
    cut = grown[: valid[0], : valid[1]]
    return np.einsum("yh,hwc,xw->yxc", interpolate(valid[0], size[0]), cut,
                     interpolate(valid[1], size[1]))  # fmt: skip


def test_full_size_maps_are_those_of_the_two_steps():
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(3, 4, 6, 5)).astype(np.float32)
    padded, largest = (32, 48), (41, 70)
    valid, size = [(32, 40), (20, 48), (1, 9)], [(41, 52), (17, 70), (3, 2)]
    places = one_shot(valid, size)
    maps = label_maps(jnp.asarray(logits)[:, None], padded, places, largest)
    assert maps.shape == (3, *largest)
    for i in range(3):
        expected = two_steps(logits[i], padded, valid[i], size[i]).argmax(-1)
        np.testing.assert_array_equal(maps[i, : size[i][0], : size[i][1]], expected)


def slide(logits, corners, padded, resized, size):
    """The mean over windows as mmsegmentation takes it, written out."""
    total, count = np.zeros((*resized, logits.shape[-1])), np.zeros(resized)
    for window, (top, left) in zip(logits, corners, strict=True):
        grown = np.einsum("yh,hwc,xw->yxc", interpolate(window.shape[0], padded[0]), window,
                          interpolate(window.shape[1], padded[1]))  # fmt: skip
        height, width = (min(padded[i], resized[i] - (top, left)[i]) for i in range(2))
        total[top : top + height, left : left + width] += grown[:height, :width]
        count[top : top + height, left : left + width] += 1
    assert count.all()
    return np.einsum("yh,hwc,xw->yxc", interpolate(resized[0], size[0]), total / count[..., None],
                     interpolate(resized[1], size[1]))  # fmt: skip


def test_maps_of_windows_are_those_of_their_mean():
    draw = np.random.default_rng(4)
    padded, largest = (32, 48), (41, 90)
    # Wide, tall, just one window, and both ways.
    resized = [(32, 120), (75, 48), (20, 48), (40, 60)]
    size = [(20, 90), (41, 26), (17, 40), (41, 52)]
    corners = [window_corners(part, padded, (24, 32)) for part in resized]
    assert [len(found) for found in corners] == [4, 3, 1, 4]
    most = max(map(len, corners))
    logits = draw.normal(size=(4, most, 4, 6, 5)).astype(np.float32)
    corner = [[*found] + [resized[i]] * (most - len(found)) for i, found in enumerate(corners)]
    places = segmentation.Places(*map(jnp.asarray, (corner, resized, size)))
    found = by_rows(lambda full: full[..., 3], logits, padded, places, largest)
    for i in range(4):
        expected = slide(logits[i, : len(corners[i])], corners[i], padded, resized[i], size[i])
        height, width = size[i]
        np.testing.assert_allclose(found[i, :height, :width], expected[..., 3], atol=1e-5)


def test_windows_that_an_image_lacks_count_for_nothing():
    def model(images):
        # A model that spoils what it is given beyond the last window.
        return jnp.where(images[:, :2, :3] > 8, jnp.nan, images[:, :2, :3])

    image = jnp.asarray(np.random.default_rng(5).normal(size=(2, 3, 4, 6, 3)), jnp.float32)
    image = image.at[:, 2].set(9).at[0, 1].set(9)
    corner = jnp.asarray([[(0, 0), (4, 6), (4, 6)], [(0, 0), (0, 2), (4, 8)]])
    batch = {"image": image, "corner": corner, "resized": jnp.asarray([(4, 6), (4, 8)])}
    logits = jax.jit(lambda batch: segmentation.predict(model, batch))(batch)
    expected = np.where([[[[1]], [[0]], [[0]]], [[[1]], [[1]], [[0]]]], 1, 0)[..., None]
    np.testing.assert_array_equal(logits, np.where(expected, image[:, :, :2, :3], 0))


def stand_in(image, classes):
    """Logits of the model that made the reference numbers; its JSON has the formula."""
    red, green, blue = np.moveaxis(image, -1, 0)[..., None]
    rows = np.linspace(-1, 1, image.shape[0])[:, None, None]
    columns = np.linspace(-1, 1, image.shape[1])[None, :, None]
    c = np.arange(classes)
    logits = red * np.cos(c) + green * np.sin(2 * c) + blue * 0.3 * c
    return logits + rows * np.sin(c + 1) + columns * np.cos(2 * c + 1)


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("segm_inference"))
def test_one_shot_protocol_of_the_authors(name):
    arrays, meta = load_fixture(name)
    classes = meta["config"]["num_classes"]
    # Their code enlarges images that are smaller than the window, which ours are by then.
    cases = [case for case in meta["config"]["cases"] if case["resized"] == case["padded"]]
    assert cases
    softmaxes = [lambda full, k=k: jax.nn.softmax(full)[..., k] for k in range(classes)]
    for case in cases:
        logits = stand_in(arrays[f"in/image.{case['n']}"][0].transpose(1, 2, 0), classes)
        logits = jnp.asarray(logits, jnp.float32)[None, None]
        padded, size = logits.shape[2:4], tuple(case["ori_shape"])
        places = one_shot([case["img_shape"]], [size])
        predicted = label_maps(logits, padded, places, size)[0]
        mirror = np.s_[:, :: -1 if case["flip"] else 1]
        np.testing.assert_array_equal(predicted[mirror], arrays[f"out/argmax.{case['n']}"])
        for k, softmax in enumerate(softmaxes):
            probability = by_rows(softmax, logits, padded, places, size)
            expected = arrays[f"out/prob.{case['n']}"][k]
            np.testing.assert_allclose(probability[0][mirror], expected, atol=1e-5)


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("segm_inference"))
def test_grid_labels_are_those_of_the_authors(name):
    arrays, _ = load_fixture(name)
    labels = arrays["in/labels"]
    height, width = labels.shape[1:]
    grids = {key: x for key, x in arrays.items() if key.startswith("out/labels_down.")}
    whole = {k: x for k, x in grids.items() if not (height % x.shape[1] or width % x.shape[2])}
    assert whole
    for grid in whole.values():
        patch = height // grid.shape[1], width // grid.shape[2]
        made = make_targets(jnp.asarray(labels), patch)
        np.testing.assert_array_equal(made["grid"].reshape(grid.shape), grid)
        np.testing.assert_array_equal(made["pixels"], labels)


def test_loss_is_the_mean_over_pixels_that_count():
    draw = np.random.default_rng(1)
    logits = draw.normal(size=(2, 2, 3, 4)).astype(np.float32)
    labels = draw.integers(0, 4, (2, 4, 6))
    labels[0, :, 2:] = IGNORE
    full = np.einsum("yh,bhwc,xw->byxc", interpolate(2, 4), logits, interpolate(3, 6))
    log_p = full - np.log(np.exp(full).sum(-1, keepdims=True))
    kept = labels != IGNORE
    expected = -np.take_along_axis(log_p, np.where(kept, labels, 0)[..., None], -1)[..., 0]
    pixels = {"pixels": jnp.asarray(labels), "grid": jnp.zeros((2, 6), jnp.int32)}
    total, parts = TASK.losses(jnp.asarray(logits), {"a": jnp.asarray(2.0)}, pixels)
    np.testing.assert_allclose(parts["main_loss"], expected[kept].mean(), rtol=1e-5)
    np.testing.assert_allclose(total, parts["main_loss"] + 2, rtol=1e-6)


def test_criterion_takes_each_query_at_its_place():
    draw = np.random.default_rng(2)
    logits = jnp.asarray(draw.normal(size=(2, 6, 4)).astype(np.float32))
    targets = {"grid": jnp.asarray([[0, 1, 2, 3, 0, IGNORE], [3, 2, IGNORE, 0, 1, 1]])}
    whole = TASK.criterion(logits, None, targets)
    order = jnp.asarray(np.stack([draw.permutation(6), draw.permutation(6)]))
    shuffled = jnp.take_along_axis(logits, order[..., None], axis=1)
    np.testing.assert_allclose(TASK.criterion(shuffled, order, targets), whole, rtol=1e-6)
    part = TASK.criterion(logits[:, :2], jnp.asarray([[0, 5], [2, 2]]), targets)
    np.testing.assert_allclose(part, -jax.nn.log_softmax(logits[0, 0])[0], rtol=1e-6)


def test_nothing_to_learn_from_is_no_loss():
    def loss(logits):
        pixels = jnp.full((1, 4, 4), IGNORE)
        return TASK.losses(logits, {}, {"pixels": pixels, "grid": pixels[:, ::2, ::2]})[0]

    value, gradient = jax.value_and_grad(loss)(jnp.ones((1, 2, 2, 3)))
    assert value == 0 and not np.asarray(gradient).any()


def batch_of(labels, size, mask=None):
    count, height, width = labels.shape
    return {
        "image": jnp.zeros((count, 1, 4, 4, 3)),
        "label": jnp.asarray(labels, jnp.uint8),
        **one_shot(jnp.full((count, 2), 4), size)._asdict(),
        "mask": jnp.ones(count) if mask is None else jnp.asarray(mask),
    }


def sums_of(predicted, batch, classes):
    """Sums of a model that is sure of a map of one pixel a patch."""
    logits = 9.0 * jax.nn.one_hot(jnp.asarray(predicted), classes)[:, None]
    return evaluation_sums(logits, batch)


def result_of(*sums):
    """What the evaluator makes of them; classes are called by their number."""
    evaluator = MeanIoU([str(k) for k in range(len(sums[0]["confusion"]))])
    for each in sums:
        evaluator.add(jax.device_get(each))
    return evaluator.result()


def test_scores_by_hand():
    # Two images; of the second a column is ignored and another lies beyond it. Class 3 is nowhere,
    # class 2 only predicted.
    first = [[0, 0, 1, 1]] * 4
    second = [[0, 1, IGNORE, IGNORE]] * 4
    found = [[[0, 0, 0, 1]] * 4, [[0, 1, 2, 2]] * 3 + [[2, 1, 1, 1]]]
    batch = batch_of(np.array([first, second]), [(4, 4), (4, 4)])
    sums = sums_of(found, batch, 4)
    # label 0: 12 pixels, 11 right, 4 more found; label 1: 12 pixels, 8 right; label 2: 1 found.
    np.testing.assert_array_equal(
        sums["confusion"], [[11, 0, 1, 0], [4, 8, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    )
    result, classes = result_of(sums)
    assert result["miou"] == pytest.approx((11 / 16 + 8 / 12 + 0 / 1) / 3)
    assert result["macc"] == pytest.approx((11 / 12 + 8 / 12) / 2)
    assert result["aacc"] == pytest.approx(19 / 24)
    assert result["examples"] == 2
    assert classes["3"] == {"iou": None, "accuracy": None, "pixels": 0.0}
    assert classes["2"]["iou"] == 0 and classes["2"]["accuracy"] is None


def test_iou_is_of_totals_and_not_a_mean_over_images():
    label = np.array([[[0] * 4] * 4, [[0, 0, 0, 1]] * 4])
    found = np.array([[[0] * 4] * 4, [[1] * 4] * 4])
    parts = [sums_of(found[i : i + 1], batch_of(label[i : i + 1], [(4, 4)]), 2) for i in range(2)]
    together = sums_of(found, batch_of(label, [(4, 4)] * 2), 2)
    result, classes = result_of(*parts)
    assert result["miou"] == pytest.approx((16 / 28 + 4 / 16) / 2)
    at_once, same = result_of(together)
    assert {k: v for k, v in at_once.items() if k != "loss"} == {
        k: v for k, v in result.items() if k != "loss"
    }
    assert same == classes


def test_images_that_fill_a_batch_do_not_count():
    label = np.zeros((2, 4, 4), int)
    sums = sums_of(label, batch_of(label, [(4, 4), (1, 1)], mask=[1.0, 0.0]), 2)
    assert int(sums["confusion"].sum()) == 16 and int(sums["count"]) == 1
    with pytest.raises(ValueError, match="no labelled pixel"):
        result_of(sums_of(label, batch_of(label + IGNORE, [(4, 4)] * 2), 2))


def test_confusion_is_the_same_on_many_devices():
    draw = np.random.default_rng(3)
    logits = draw.normal(size=(8, 1, 2, 3, 5)).astype(np.float32)
    labels = draw.integers(0, 5, (8, 21, 33)).astype(np.uint8)
    labels[draw.random(labels.shape) < 0.2] = IGNORE
    batch = {
        "image": jnp.zeros((8, 1, 16, 24, 3)),
        "label": jnp.asarray(labels),
        **one_shot(draw.integers(3, 16, (8, 2)), draw.integers(5, 21, (8, 2)))._asdict(),
        "mask": jnp.ones(8),
    }
    alone = evaluation_sums(jnp.asarray(logits), batch)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert mesh.size > 1
    place = NamedSharding(mesh, PartitionSpec("data"))
    spread = evaluation_sums(jax.device_put(logits, place), jax.device_put(batch, place))
    np.testing.assert_array_equal(spread["confusion"], alone["confusion"])
    assert int(alone["confusion"].sum()) == (labels != IGNORE).sum()
