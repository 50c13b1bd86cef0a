"""Images and maps stay together through every transform; labels of the released code's size."""

import json
import pickle

import numpy as np
import pytest
from conftest import fixture_names, load_fixture
from hypothesis import given, settings
from hypothesis import strategies as st

from cropr_jax.data import resize, segmentation
from cropr_jax.data.preprocess import normalize
from cropr_jax.data.readers.fake import FakeMaps
from cropr_jax.data.records import Source
from cropr_jax.errors import ConfigError

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def fields(**changes):
    train = {
        "resize_base": (32, 32),
        "ratio_range": (0.5, 2.0),
        "cat_max_ratio": 0.75,
        "flip": True,
        "photometric": False,
    }
    train |= changes.pop("train", {})
    return {"res": (32, 32), **PLAIN, "train": train, **changes}


def gradient(height, width):
    """An image that tells where each pixel was, and the map that tells the same, within 8 x 8."""
    rows, columns = np.arange(height)[:, None], np.arange(width)[None]
    label = (rows * 8 // height) * 8 + columns * 8 // width
    image = np.stack(
        np.broadcast_arrays(rows * 256 // height, columns * 256 // width, label * 4), -1
    )
    return image.astype(np.uint8), label.astype(np.uint8)


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 80),
    width=st.integers(1, 80),
    res=st.tuples(st.integers(1, 48), st.integers(1, 48)),
    base=st.tuples(st.integers(8, 64), st.integers(8, 64)),
    seed=st.integers(0, 2**20),
)
def test_training_keeps_ids_and_ignores_only_what_is_padding(height, width, res, base, seed):
    rng = np.random.default_rng(seed)
    image = rng.integers(1, 256, (height, width, 3), np.uint8)
    label = rng.choice(np.array([0, 3, 7, 149], np.uint8), (height, width))
    transform = segmentation.train_transform(fields(res=res, train={"resize_base": base}))
    record = {"image": image, "label": label}
    made = transform(record, np.random.default_rng(seed))
    assert made["image"].shape == (*res, 3) and made["image"].dtype == np.float32
    assert made["label"].shape == res and made["label"].dtype == np.uint8
    ids = set(np.unique(made["label"]))
    assert ids <= set(np.unique(label)) | {255}
    # Pixels are 1 at least, so that 0 is padding.
    np.testing.assert_array_equal(made["label"] == 255, (made["image"] == 0).all(-1))
    again = transform(record, np.random.default_rng(seed))
    for key in made:
        np.testing.assert_array_equal(made[key], again[key])


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(24, 90),
    width=st.integers(24, 90),
    seed=st.integers(0, 2**20),
    flip=st.booleans(),
)
def test_training_moves_image_and_map_alike(height, width, seed, flip):
    image, label = gradient(height, width)
    setting = fields(train={"ratio_range": (0.8, 2.0), "flip": flip})
    made = segmentation.train_transform(setting)(
        {"image": image, "label": label}, np.random.default_rng(seed)
    )
    real = made["label"] != 255
    for channel, told in ((0, made["label"] // 8), (1, made["label"] % 8)):
        place = made["image"][..., channel][real] * 255 / 32
        # Nearest takes the pixel above and to the left, bilinear lies between two.
        slack = 1.6 * 8 / 24 + 0.1
        assert (place > told[real] - slack).all() and (place < told[real] + 1 + slack).all()


def test_flipping_is_seen_in_half_of_the_examples():
    image, label = gradient(32, 32)
    setting = fields(train={"ratio_range": (1.0, 1.0), "cat_max_ratio": 1})
    transform = segmentation.train_transform(setting)
    flips = []
    for seed in range(100):
        made = transform({"image": image, "label": label}, np.random.default_rng(seed))["label"]
        assert (made == label).all() or (made == label[:, ::-1]).all()
        flips.append((made != label).any())
    assert 35 <= sum(flips) <= 65


@pytest.mark.parametrize(
    "size, base, ratio, expected",
    [
        ((512, 683), (512, 512), 1.0, (384, 512)),  # the long side decides
        ((512, 683), (2048, 512), 1.0, (512, 683)),  # the short side decides
        ((683, 512), (2048, 512), 0.5, (341, 256)),  # 341.5 rounds through its factor
        ((100, 1000), (2048, 512), 1.0, (205, 2048)),  # a long strip: the long side again
    ],
)
def test_random_size(size, base, ratio, expected):
    rng = np.random.default_rng(0)
    found = segmentation.random_size(size, base, (ratio, ratio), rng)
    assert np.abs(np.subtract(found, expected)).max() <= int(ratio == 0.5)


def test_sizes_cover_the_range():
    rng = np.random.default_rng(0)
    sides = [segmentation.random_size((60, 80), (64, 64), (0.5, 2.0), rng)[1] for _ in range(500)]
    assert min(sides) == 32 and 125 <= max(sides) <= 128
    assert abs(np.mean(sides) - 80) < 4


def crop_counts(label, window):
    top, left, height, width = window
    return np.bincount(label[top : top + height, left : left + width].ravel(), minlength=256)


def test_crops_avoid_one_class():
    # One class everywhere but in a corner, which a crop seldom meets.
    label = np.zeros((100, 100), np.uint8)
    label[:30, :30] = 1
    label[60:] = 255
    mixed = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        window = segmentation.random_crop(label, (100, 100), (32, 32), 0.75, rng)
        counts = crop_counts(label, window)[:255]
        mixed += counts.max() < 0.75 * counts.sum()
        assert window[2:] == (32, 32)
    free = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        counts = crop_counts(label, segmentation.random_crop(label, (100, 100), (32, 32), 1.0, rng))
        free += counts[:255].max() < 0.75 * counts[:255].sum()
    assert mixed > 3 * free > 0


def test_the_first_crop_of_mixed_classes_is_taken():
    taken = []
    for seed in range(60):
        blocks = np.random.default_rng(seed).choice([0, 0, 0, 1, 2, 255, 255], (6, 6))
        label = np.repeat(np.repeat(blocks, 10, 0), 10, 1).astype(np.uint8)
        other = np.random.default_rng(seed)
        windows = [
            (*(int(other.integers(0, 40, endpoint=True)) for _ in range(2)), 20, 20)
            for _ in range(11)
        ]
        counts = np.array([crop_counts(label, window)[:3] for window in windows])
        mixed = ((counts > 0).sum(1) > 1) & (counts.max(1) < 0.75 * counts.sum(1))
        number = next((i for i in range(10) if mixed[i]), 10)
        rng = np.random.default_rng(seed)
        found = segmentation.random_crop(label, (60, 60), (20, 20), 0.75, rng)
        assert found == windows[number]
        taken.append(number)
    assert 0 in taken and max(taken) >= 3


def test_a_crop_of_one_class_is_taken_in_the_end():
    for value in (3, 255):
        label = np.full((50, 20), value, np.uint8)
        rng = np.random.default_rng(0)
        window = segmentation.random_crop(label, (50, 20), (32, 32), 0.75, rng)
        assert window[1:] == (0, 32, 20) and 0 <= window[0] <= 18
        # One draw for each of the two offsets, ten times over after the first.
        other = np.random.default_rng(0)
        for _ in range(11):
            top = other.integers(0, 18, endpoint=True)
            other.integers(0, 0, endpoint=True)
        assert window[0] == top


@settings(max_examples=40, deadline=None)
@given(
    size=st.tuples(st.integers(4, 60), st.integers(4, 60)),
    res=st.tuples(st.integers(4, 40), st.integers(4, 40)),
)
def test_evaluation_fits_the_image_in_and_leaves_the_map(size, res):
    source = Source(FakeMaps(num_examples=6, image_size=size, num_classes=4), 0, 6)
    setting = fields(res=res)
    transform = pickle.loads(pickle.dumps(segmentation.eval_transform(setting, source)))
    for index in range(6):
        record = source[index]
        made = transform(record)
        height, width = made["resized"]
        assert (height, width) == resize.fitted(record["label"].shape, res)
        assert height == res[0] or width == res[1]
        assert made["image"].shape == (1, *res, 3) and (made["corner"] == 0).all()
        assert (made["image"][0, height:] == 0).all() and (made["image"][0, :, width:] == 0).all()
        np.testing.assert_array_equal(made["size"], record["label"].shape)
        rows, columns = made["size"]
        assert made["label"].shape == size
        np.testing.assert_array_equal(made["label"][:rows, :columns], record["label"])
        assert (made["label"][rows:] == 255).all() and (made["label"][:, columns:] == 255).all()
        padding = segmentation.filler(setting, source, train=False)
        assert {k: (v.shape, v.dtype) for k, v in padding.items()} == {
            k: (v.shape, v.dtype) for k, v in made.items()
        }


def test_evaluation_normalises_before_it_pads():
    setting = fields(res=(8, 8), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    made = segmentation.eval_windows(np.full((4, 8, 3), 255, np.uint8), setting)
    (image,) = made.pixels
    assert made.resized == (4, 8)
    assert (image[:4] == 1).all() and (image[4:] == 0).all()
    # Saved settings come back from JSON as lists.
    saved = json.loads(json.dumps(setting))
    again = segmentation.eval_windows(np.full((4, 8, 3), 255, np.uint8), saved)
    np.testing.assert_array_equal(again.pixels, made.pixels)
    with pytest.raises(ConfigError, match=r"config\.preprocess\.std"):
        segmentation.eval_windows(np.zeros((4, 8, 3), np.uint8), setting | {"std": 0.5})


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    res=st.tuples(st.integers(4, 40), st.integers(4, 40)),
    share=st.tuples(st.floats(0.2, 1), st.floats(0.2, 1)),
)
def test_windows_cover_the_image_along_one_side(size, res, share):
    stride = (max(int(res[0] * share[0]), 1), max(int(res[1] * share[1]), 1))
    setting = fields(res=res, eval_stride=stride)
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3)).astype(np.uint8)
    made = segmentation.eval_windows(pixels, setting)
    height, width = made.resized
    # It fills the window, or is four windows long.
    assert {height, width} & {res[0], res[1], 4 * res[0], 4 * res[1]}
    assert (height <= res[0] or width <= res[1]) and height <= 4 * res[0] and width <= 4 * res[1]
    whole = resize.bilinear(pixels, made.resized, resize.whole(made.resized))
    whole = normalize(whole, setting["mean"], setting["std"])
    seen = np.zeros(made.resized, bool)
    inside = (made.corner < made.resized).all(1)
    assert inside[0] and len(made.pixels) == segmentation.most_windows(setting)
    for window, (top, left) in zip(made.pixels[inside], made.corner[inside], strict=True):
        part = whole[top : top + res[0], left : left + res[1]]
        np.testing.assert_array_equal(window[: part.shape[0], : part.shape[1]], part)
        assert not window[part.shape[0] :].any() and not window[:, part.shape[1] :].any()
        seen[top : top + res[0], left : left + res[1]] = True
    assert seen.all()
    corners = made.corner[inside]
    steps = np.diff(corners, axis=0)
    assert (steps >= 0).all() and (steps <= stride).all()
    assert not made.pixels[~inside].any()


def test_strides_of_mmsegmentation_on_ade20k():
    """(2048, 512) and a stride of 341: two windows for 4:3, six at most."""
    setting = fields(res=(512, 512), eval_stride=(341, 341))
    made = segmentation.eval_windows(np.zeros((512, 683, 3), np.uint8), setting)
    assert made.resized == (512, 683) and len(made.pixels) == 6
    assert made.corner[:2].tolist() == [[0, 0], [0, 171]]
    assert (made.corner[2:] == (512, 683)).all()


@pytest.mark.parametrize(
    "change, field",
    [
        ({"res": 32}, r"res is 32"),
        ({"mean": (0.5,)}, "mean"),
        ({"eval_stride": 341}, "eval_stride is 341"),
        ({"eval_stride": (0, 8)}, r"eval_stride is \(0, 8\).*leave it out for one shot"),
        ({"res": (8, 8), "eval_stride": (8, 9)}, r"eval_stride is \(8, 9\).*no larger than res"),
        ({"train": {"resize_base": 512}}, r"train\.resize_base is 512"),
        ({"train": {"resize_base": (0, 512)}}, r"train\.resize_base"),
        ({"train": {"ratio_range": ("low", 2.0)}}, r"train\.ratio_range is .*2 numbers"),
        ({"train": {"ratio_range": (2.0, 0.5)}}, r"train\.ratio_range.*smaller one first"),
        ({"train": {"cat_max_ratio": 75}}, r"train\.cat_max_ratio is 75"),
    ],
)
def test_bad_fields_are_named(change, field):
    with pytest.raises(ConfigError, match=rf"config\.preprocess\.{field}"):
        segmentation.train_transform(fields(**change))


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("segm_inference"))
def test_padding_and_cropping_are_the_released_ones(name):
    arrays, _ = load_fixture(name)
    image = arrays["in/unpadded"][0].transpose(1, 2, 0)
    for key in (key for key in arrays if key.startswith("out/padded")):
        padded = arrays[key][0].transpose(1, 2, 0)
        multiple = int(key.removeprefix("out/padded"))
        size = tuple(-(-side // multiple) * multiple for side in image.shape[:2])
        np.testing.assert_array_equal(segmentation.pad(image, size, 0), padded)
        cropped = arrays["out/cropped"][0].transpose(1, 2, 0)
        np.testing.assert_array_equal(padded[: cropped.shape[0], : cropped.shape[1]], cropped)


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("segm_inference"))
def test_labels_go_down_by_their_top_left_pixel(name):
    arrays, _ = load_fixture(name)
    labels = arrays["in/labels"].astype(np.uint8)
    for key in (key for key in arrays if key.startswith("out/labels_down")):
        size = arrays[key].shape[1:]
        for label, expected in zip(labels, arrays[key], strict=True):
            np.testing.assert_array_equal(resize.nearest(label, size, resize.whole(size)), expected)
