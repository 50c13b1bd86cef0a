"""Where a model ranks the label of every image of some folders."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, UInt8

from cropr_jax.core import rng
from cropr_jax.errors import ConfigError
from cropr_jax.models import Trunk
from cropr_jax.tasks.classification.task import rank_of_label

# Mean and standard deviation of each channel, of values in 0..1.
Normalization = tuple[tuple[float, ...], tuple[float, ...]]


@dataclasses.dataclass(frozen=True)
class Images:
    """Labelled images of all folders together.

    Attributes:
      pixels: RGB, 0 to 255.
      labels: class of each.
      folders: name, number of images and crop ratio of each folder.
    """

    pixels: UInt8[np.ndarray, "n h w 3"]
    labels: Int[np.ndarray, "n"]
    folders: tuple[dict[str, Any], ...]

    def digest(self) -> str:
        """Tells image sets and preprocessing apart."""
        return hashlib.sha256(self.pixels.tobytes() + self.labels.tobytes()).hexdigest()


def read_images(folders: Sequence[tuple[str, Any]], model: Trunk) -> Images:
    """Decodes, resizes and crops all images, as in evaluation.

    Args:
      folders: (folder with a labels.json, crop ratio or 'none' to crop only).
      model: for the size and the number of classes.

    Raises:
      ConfigError: if a folder cannot be read or has labels beyond the model's classes.
    """
    from cropr_jax.data import preprocess
    from cropr_jax.data.open import open_source

    pixels, labels, found = [], [], []
    for folder, ratio in folders:
        data = {"source": "image_folder", "dir": folder, "num_classes": model.num_classes}
        source = open_source(data, "all")
        if source.num_classes > model.num_classes:
            raise ConfigError(
                f"--data: '{folder}' has labels up to {source.num_classes - 1}, the weights "
                f"{model.num_classes} classes"
            )
        settings = {"res": model.image_size, "interpolation": "bicubic", "crop_ratio": ratio}
        for i in range(len(source)):
            image = preprocess.decode(source[i]["image"])
            pixels.append(np.asarray(preprocess.eval_image(image, settings)))
            labels.append(source[i]["label"])
        found.append({"name": Path(folder).name, "images": len(source), "crop_ratio": ratio})
    return Images(np.stack(pixels), np.array(labels, np.int32), tuple(found))


@functools.partial(jax.jit, static_argnums=(0, 1))
def batch_ranks(
    model: Trunk,
    normalize: Normalization,
    params: Mapping[str, Any],
    pixels: UInt8[Array, "b h w 3"],
    labels: Int[Array, "b"],
    keys: Key[Array, "b"],
) -> Int[Array, "b"]:
    """Rank of the label among the logits of each image, 0 for right; one program per model."""
    mean, std = (jnp.asarray(value, jnp.float32) for value in normalize)
    images = (pixels.astype(jnp.float32) / 255 - mean) / std
    logits, _ = model.apply({"params": params}, images, keys=keys)
    return rank_of_label(logits, labels)


def ranks(
    model: Trunk,
    normalize: Normalization,
    params: Mapping[str, Any],
    images: Images,
    seed: int,
    batch_size: int,
) -> Int[np.ndarray, "n"]:
    """Rank of the label for every image; draws depend on the seed and the image's number alone."""
    count = len(images.labels)
    found = []
    for start in range(0, count, batch_size):
        # The last batch is filled up with the last image, so that no second program is compiled.
        ids = np.minimum(np.arange(start, start + batch_size), count - 1)
        keys = rng.example_keys(jax.random.key(seed), 0, jnp.asarray(ids))
        found.append(
            batch_ranks(model, normalize, params, images.pixels[ids], images.labels[ids], keys)
        )
    return np.concatenate(found)[:count]
