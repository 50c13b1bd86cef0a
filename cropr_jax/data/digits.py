"""The handwritten digits that scikit-learn ships, as a TFDS data set.

1,797 grey images of 8x8 pixels in 10 classes (UCI "Optical Recognition of Handwritten Digits",
test part), with a fixed stratified random split of 80 to 20 per cent. No network is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from cropr_jax.errors import ConfigError

SPLIT_SEED = 0
TEST_SHARE = 0.2


class CroprDigits(tfds.core.GeneratorBasedBuilder):
    """8x8 grey digits; features `image` (PNG, uint8 [8, 8, 1]) and `label` (0 to 9)."""

    name = "cropr_digits"
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    # Where TFDS would look for checksums of downloads: there are none, and the look-up needs
    # importlib_resources, which TFDS does not install.
    code_path = None

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Handwritten digits of scikit-learn (UCI optdigits, test part).",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), encoding_format="png"),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://archive.ics.uci.edu/dataset/80",
        )

    def _split_generators(self, dl_manager):
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = to_uint8(digits.images)
        train, test = stratified_split(digits.target)
        return {
            "train": self._generate_examples(images, digits.target, train),
            "test": self._generate_examples(images, digits.target, test),
        }

    def _generate_examples(self, images, labels, indices):
        for index in indices:
            # Bytes of a file, not an array: TFDS encodes arrays with TensorFlow.
            file = io.BytesIO()
            Image.fromarray(images[index]).save(file, format="PNG")
            file.seek(0)
            yield int(index), {"image": file, "label": int(labels[index])}


def to_uint8(images: np.ndarray) -> np.ndarray:
    """Values 0 to 16 (float [n, 8, 8]) to uint8 0 to 255, rounded."""
    return np.round(images * (255 / 16)).astype(np.uint8)


def stratified_split(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices (train, test), sorted: a fixed random fifth of every class for testing."""
    rng = np.random.Generator(np.random.PCG64(SPLIT_SEED))
    test = []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        test.append(members[: round(TEST_SHARE * len(members))])
    test = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels)), test), test


def prepare(folder: str = "") -> Path:
    """Makes the data set in `folder` unless it is there, silently, and returns where it lies.

    Args:
      folder: TFDS data folder; by default `$CROPR_DATA_DIR`, else `~/.cache/cropr_jax/tfds`, or,
        with a warning, a folder for temporary files where that cannot be written.

    Raises:
      ConfigError: if a folder that was named cannot be written.
    """
    folder = os.path.expanduser(folder or os.environ.get("CROPR_DATA_DIR") or _default())
    builder = CroprDigits(data_dir=folder, file_format="array_record")
    prepared = Path(builder.data_dir)
    if not (prepared / "dataset_info.json").is_file():
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"config.data.dir: cannot write the digits to '{folder}' ({error.strerror}); name "
                "another folder"
            ) from error
        with open(os.path.join(folder, "cropr_digits.lock"), "w") as lock:
            # Two processes of one run come here together; the second finds the work done.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (prepared / "dataset_info.json").is_file():
                _prepare(folder)
    return prepared


def _default() -> str:
    """The user's cache, or a folder for temporary files where there is none."""
    folder = os.path.expanduser("~/.cache/cropr_jax/tfds")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        found = os.path.join(tempfile.gettempdir(), f"cropr_jax-{os.getuid()}", "tfds")
        print(
            f"warning: '{folder}' cannot be written ({error.strerror}): the digits are kept in "
            f"'{found}'",
            file=sys.stderr,
        )
        return found
    return folder


def _prepare(folder: str) -> None:
    # A new builder: one made before another process wrote the data does not see it.
    builder = CroprDigits(data_dir=folder, file_format="array_record")
    config = tfds.download.DownloadConfig(
        compute_stats=tfds.download.ComputeStatsMode.SKIP, try_download_gcs=False
    )
    with quiet():
        builder.download_and_prepare(download_config=config)


@contextlib.contextmanager
def quiet():
    """No progress bars and no information messages of TFDS and absl."""
    tfds.disable_progress_bar()
    absl_logger = logging.getLogger("absl")
    level = absl_logger.level
    absl_logger.setLevel(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        absl_logger.setLevel(level)
