"""TFDS-prepared data sets, read without TensorFlow, their images left encoded.

array_record copies are read through TFDS's own data source; tfrecord copies, which that refuses
(tensorflow/datasets `core/dataset_builder.py:as_data_source`), in place through an offset index.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cropr_jax.data import sources
from cropr_jax.data.tfrecord import RecordFileError, TFRecordReader
from cropr_jax.errors import ConfigError


def open_tfds(data: Mapping[str, Any], split: str) -> TfdsReader:
    """One whole split of the data set `data['name']` (`name[/config][:version]`).

    Looked for in `data.dir`, else in the variable that `data.env` names (TFDS_DATA_DIR), else in
    `~/tensorflow_datasets`. `cropr_digits` is prepared on first use.
    """
    if data["name"] == "cropr_digits":
        from cropr_jax.data import digits

        return TfdsReader(digits.prepare(data.get("dir", "")), split)
    env = data.get("env", "") or "TFDS_DATA_DIR"
    root = sources.data_root(data, env, "~/tensorflow_datasets")
    return TfdsReader(find_prepared(root, data["name"], env), split)


def find_prepared(root: Path, name: str, env: str) -> Path:
    """The folder of a prepared data set below `root`; of several versions the newest.

    Looked up on disk, not by TFDS's registry, which would ask cloud storage for metadata.
    """
    name, _, version = name.partition(":")
    found = sorted(
        (p.parent for p in (root / name).glob(f"{version or '*'}/dataset_info.json")),
        key=lambda folder: [int(n) if n.isdigit() else -1 for n in folder.name.split(".")],
    )
    if not found:
        raise ConfigError(
            f"data set {name!r}: no {root / name / (version or '<version>')}/dataset_info.json. "
            f"Prepare it with TFDS, or set config.data.dir or the environment variable {env} to "
            "the folder that holds it."
        )
    return found[-1]


class TfdsReader:
    """A split of a prepared data set with features `image` and `label`.

    Raises:
      ConfigError: no such split, other features, another file format.
      RecordFileError: a shard is missing or is not what the data set says.
    """

    def __init__(self, folder: str | os.PathLike, split: str):
        import tensorflow_datasets as tfds

        self._folder, self._split = os.fspath(folder), split
        self._example: Callable[[int], dict[str, Any]] | None = None
        info: Any = tfds.builder_from_directory(self._folder).info
        if split not in info.splits:
            raise ConfigError(
                f"data split {split!r}: {folder} has {', '.join(sorted(info.splits))}. "
                "Name one of them."
            )
        features = dict(info.features.items())
        if "image" not in features or not hasattr(features.get("label"), "names"):
            raise ConfigError(
                f"{folder}: features are {sorted(features)}, expected 'image' and a class 'label'."
            )
        shards = [os.fspath(path) for path in info.splits[split].filepaths]
        for path in shards:
            if not os.path.isfile(path):
                raise RecordFileError(
                    f"{path}: shard not found, the data set has {len(shards)}. Copy it again, or "
                    "prepare the data set anew."
                )
        file_format = info.file_format.value
        if file_format not in ("array_record", "tfrecord"):
            raise ConfigError(
                f"{folder}: file format {file_format}, expected array_record or tfrecord. "
                "Prepare the data set in one of these."
            )
        self.class_names = tuple(features["label"].names)
        self._length = info.splits[split].num_examples
        self._records = None
        if file_format == "tfrecord":
            self._records = TFRecordReader(shards, info.splits[split].shard_lengths)

    def __len__(self) -> int:
        return self._length

    def __call__(self, index: int) -> tuple[bytes | np.ndarray, int]:
        if self._example is None:
            self._example = self._open()
        example = self._example(index)
        return example["image"], example["label"]

    def _open(self) -> Callable[[int], dict[str, Any]]:
        import tensorflow_datasets as tfds

        builder: Any = tfds.builder_from_directory(self._folder)
        decoders = {"image": tfds.decode.SkipDecoding()}
        if self._records is None:
            return builder.as_data_source(self._split, decoders=decoders).__getitem__
        records = self._records
        features: Any = builder.info.features
        return lambda index: features.deserialize_example_np(records[index], decoders=decoders)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_example": None}
