"""The predictor of segmentation, its picture and its artefacts."""

import jax
import numpy as np
import pytest
from conftest import random_params
from PIL import Image

from cropr_jax import models
from cropr_jax.data.readers.fake import FakeMaps
from cropr_jax.data.records import Source
from cropr_jax.data.segmentation import eval_transform
from cropr_jax.exported import load_exported
from cropr_jax.tasks.segmentation import evaluation as segmentation
from cropr_jax.tasks.segmentation.predictor import SegmentationPredictor

CONFIG = {
    "head": "segmentation",
    "width": 16,
    "depth": 3,
    "heads": 2,
    "patch": 8,
    "image_size": (16, 32),
    "num_classes": 5,
    "reduction": {"name": "cropr", "rate": 2, "fusion": "llf"},
}
PREPROCESS = {"res": (16, 32), "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
NAMES = ("sky", "road", "car", "tree", "wall")


def build(model):
    params = random_params(model)
    # Biases would outweigh the tokens; maps should have more than one class.
    for name in ("norm", "head"):
        params[name]["bias"] = np.zeros_like(params[name]["bias"])
    return SegmentationPredictor.from_model(model, params, PREPROCESS, NAMES)


@pytest.fixture(scope="module")
def predictor():
    return build(models.create(CONFIG))


def images(*sizes):
    draw = np.random.default_rng(0)
    return [draw.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


def test_maps_have_the_sizes_of_the_images_whatever_the_batch(predictor, tmp_path):
    made = images((20, 50), (70, 31), (16, 32))
    Image.fromarray(made[1]).save(tmp_path / "a.png")
    maps = predictor.segment([made[0], tmp_path / "a.png", made[2]])
    assert [labels.shape for labels in maps] == [(20, 50), (70, 31), (16, 32)]
    assert all(labels.dtype == np.uint8 for labels in maps)
    assert len(np.unique(np.concatenate([labels.ravel() for labels in maps]))) > 1
    for one, other in zip(maps, predictor.segment(made, batch_size=2), strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_image_of_the_model_s_size_needs_no_resizing(predictor):
    (image,) = images((16, 32))
    (labels,) = predictor.segment([image])
    logits = predictor(image[None])
    assert logits.shape == (1, 2, 4, 5)
    # Upsampling changes nothing at the centre of four equal patches, so compare corner pixels.
    corners = np.asarray(logits)[0, [0, 0, 1, 1], [0, 3, 0, 3]].argmax(-1)
    np.testing.assert_array_equal(labels[[0, 0, 15, 15], [0, 31, 0, 31]], corners)


@pytest.mark.slow
def test_sliding_windows_are_those_of_evaluation(predictor):
    settings = PREPROCESS | {"eval_stride": (10, 20)}
    sliding = SegmentationPredictor(predictor.model, predictor.params, settings, NAMES)
    made = images((20, 150), (170, 31), (16, 32))
    source = Source(FakeMaps(num_examples=1, image_size=(170, 150), num_classes=5), 0, 1)
    transform = eval_transform(settings, source)
    records = [{"image": image, "label": np.zeros(image.shape[:2], np.uint8)} for image in made]
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *map(transform, records))
    assert batch["image"].shape == (3, 6, 16, 32, 3)
    logits = np.stack([predictor(batch["image"][:, i]) for i in range(6)], 1)
    places = segmentation.Places(*(batch[k] for k in ("corner", "resized", "size")))
    label_maps = jax.jit(segmentation.label_maps, static_argnums=(1, 3))
    expected = label_maps(logits, (16, 32), places, (170, 150))
    maps = sliding.segment(made, batch_size=2)
    for labels, whole, image in zip(maps, np.asarray(expected), made, strict=True):
        np.testing.assert_array_equal(labels, whole[: image.shape[0], : image.shape[1]])
    # Long images are seen closer; one of the window's size is the same either way.
    once = predictor.segment(made)
    assert (maps[0] != once[0]).any() and (maps[2] == once[2]).all()
    assert sliding.prepare(made).shape == (3, 16, 32, 3)


def test_shares_of_a_map(predictor):
    labels = np.array([[1, 1, 1], [3, 3, 0]], np.uint8)
    assert predictor.shares(labels, 2) == [("road", 1 / 2), ("tree", 1 / 3)]
    assert len(predictor.shares(labels)) == 3


@pytest.mark.parametrize("reduction", ["cropr", "none"])
def test_picture(predictor, tmp_path, reduction):
    if reduction == "none":
        predictor = build(models.unpruned(predictor.model).clone(slim=False))
    made = images((20, 50), (70, 31))
    truth = [np.zeros((20, 50), np.uint8), np.full((70, 31), 255, np.uint8)]
    found = predictor.explain(made, tmp_path / "a.png", truth)
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.width > 200
    assert all(name in NAMES for name, _ in found[0])
    assert sum(share for _, share in found[0]) == pytest.approx(1)


@pytest.mark.parametrize("format", ["jax", "onnx"])
def test_export_gives_the_logits_of_the_patches(predictor, tmp_path, format):
    path = tmp_path / "model"
    predictor.export(path, format=format)
    pixels = np.stack(images((16, 32), (16, 32), (16, 32)))
    if format == "jax":
        loaded = load_exported(path)
        assert loaded.metadata["output"]["shape"] == ["batch", 2, 4, 5]
        logits = loaded(pixels)
    else:
        import onnxruntime as runtime

        logits = runtime.InferenceSession(path.read_bytes()).run(None, {"images": pixels})[0]
    np.testing.assert_allclose(np.asarray(logits), predictor(pixels), atol=1e-5)
