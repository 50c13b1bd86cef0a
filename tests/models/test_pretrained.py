"""Real pretrained weights give the logits and the accuracy that were measured elsewhere."""

import json

import jax
import numpy as np
import pytest
from conftest import DATA
from PIL import Image

from cropr_jax import models
from cropr_jax.convert.timm import params_from_state_dict

pytestmark = [pytest.mark.slow, pytest.mark.real_data]


@pytest.fixture(scope="module")
def classify():
    """uint8 images [b, 224, 224, 3] -> logits of the AugReg ViT-Ti."""
    model = models.create({"variant": "ti", "image_size": 224, "num_classes": 1000, "pool": "cls"})
    with np.load(DATA / "weights" / "vit_tiny_patch16_224.npz") as weights:
        params = params_from_state_dict(dict(weights), model)
    forward = jax.jit(lambda params, images: model.apply({"params": params}, images)[0])
    return lambda images: np.asarray(forward(params, images.astype(np.float32) / 127.5 - 1))


def test_logits_of_an_independent_float64_forward_pass(classify):
    with np.load(DATA / "weights" / "reference_logits.npz") as reference:
        found = classify(reference["inputs"])
        np.testing.assert_allclose(found, reference["logits"], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(found.argmax(1), [259, 300, 320, 355])


def test_accuracy_on_imagenet_validation_images(classify):
    folder = DATA / "imagenet_val227"
    entries = json.loads((folder / "labels.json").read_text())["images"]
    right = np.zeros(5, int)
    for start in range(0, len(entries), 50):
        batch = entries[start : start + 50]
        # The crop of the reference measurement; torchvision's rounding would start at pixel 2.
        images = np.stack(
            [np.asarray(Image.open(folder / "images" / e["file_name"])) for e in batch]
        )[:, 1:225, 1:225]
        labels = np.array([entry["label"] for entry in batch])
        best = np.argsort(-classify(images), axis=1)[:, :5]
        right += (best == labels[:, None]).sum(0)
    assert len(entries) == 300
    assert (right[0], right.sum()) == (243, 285)
