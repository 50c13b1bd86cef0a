"""TFDS-prepared data sets, read without TensorFlow, their images and masks left encoded.

array_record copies are read through TFDS's own data source; tfrecord copies, which that refuses
(tensorflow/datasets `core/dataset_builder.py:as_data_source`), in place through an offset index.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cropr_jax.data import records
from cropr_jax.data.annotations import make_legend, read_mask
from cropr_jax.data.readers.tfrecord import RecordFileError, TFRecordReader
from cropr_jax.errors import ConfigError

# Commands that prepare our own data sets.
_HOW = {"ade20k": "python -m cropr_jax.data.ade20k --release ADEChallengeData2016"}


def open_tfds(data: Mapping[str, Any], split: str) -> TfdsReader | TfdsMaps:
    """One whole split of the data set `data['name']` (`name[/config][:version]`).

    Looked for in `data.dir`, else in the variable that `data.env` names (TFDS_DATA_DIR), else in
    `~/tensorflow_datasets`. `cropr_digits` is prepared on first use.

    Raises:
      ConfigError: it is not there, or is `scene_parse150`, whose masks mean something else.
    """
    if re.split("[/:]", data["name"])[0] == "scene_parse150":
        raise ConfigError(
            "config.data.name is 'scene_parse150': that TFDS data set reads the masks of the 2017 "
            "instance challenge (100 kinds of objects; no sky, wall or floor), which are not the "
            "150 classes of ADE20k. Use 'ade20k' (python -m cropr_jax.data.ade20k prepares it)."
        )
    if data["name"] == "cropr_digits":
        from cropr_jax.data import digits

        return TfdsReader(TfdsRecords(digits.prepare(data.get("dir", "")), split))
    env = data.get("env", "") or "TFDS_DATA_DIR"
    root = records.data_root(data, env, "~/tensorflow_datasets")
    folder = find_prepared(root, data["name"], env)
    found, metadata = TfdsRecords(folder, split), folder / "metadata.json"
    if "label_map" in found.features and metadata.is_file():
        return TfdsMaps(found, metadata, data)
    return TfdsReader(found)


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
            f"Prepare it with {_HOW.get(name, 'TFDS')}, or set config.data.dir or the environment "
            f"variable {env} to the folder that holds it."
        )
    return found[-1]


class TfdsReader:
    """A split of a prepared data set with features `image` and `label`.

    Raises:
      ConfigError: other features, or as `TfdsRecords`.
    """

    kind = records.CLASS

    def __init__(self, records: TfdsRecords):
        features = records.features
        if "image" not in features or not hasattr(features.get("label"), "names"):
            raise ConfigError(
                f"{records.folder}: features are {sorted(features)}, expected 'image' and a class "
                "'label', or 'image' and a 'label_map' with metadata.json (see data/ade20k.py)."
            )
        self.class_names = tuple(features["label"].names)
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __call__(self, index: int) -> tuple[bytes | np.ndarray, int]:
        example = self._records[index]
        return example["image"], example["label"]

    def where(self, index: int) -> str:
        return self._records.where(index)


class TfdsMaps:
    """A split with features `image` and `label_map`, and what metadata.json says of them.

    That is a description of the classes, as `make_legend` takes it, and `largest`, the greatest
    height and width of a mask by split.
    """

    kind = records.MAP

    def __init__(self, records: TfdsRecords, metadata: Path, data: Mapping[str, Any]):
        meta = json.loads(metadata.read_text())
        self._legend = make_legend(meta, data, str(metadata))
        self._height, self._width = meta["largest"][records.split]
        self._records = records

    @property
    def class_names(self) -> tuple[str, ...]:
        return self._legend.class_names

    def largest(self) -> tuple[int, int]:
        return self._height, self._width

    def __len__(self) -> int:
        return len(self._records)

    def __call__(self, index: int) -> tuple[bytes | np.ndarray, np.ndarray]:
        example, where = self._records[index], self.where(index)
        return example["image"], self._legend.labels(read_mask(example["label_map"], where), where)

    def where(self, index: int) -> str:
        return self._records.where(index)


class TfdsRecords:
    """A split of a prepared data set, its images and masks left encoded.

    Attributes:
      folder: of the prepared data set.
      split: its name.
      features: TFDS's, by name.

    Raises:
      ConfigError: no such split, another file format.
      RecordFileError: a shard is missing or is not what the data set says.
    """

    def __init__(self, folder: str | os.PathLike, split: str):
        import tensorflow_datasets as tfds

        self.folder, self.split = os.fspath(folder), split
        self._example: Callable[[int], dict[str, Any]] | None = None
        info: Any = tfds.builder_from_directory(self.folder).info
        if split not in info.splits:
            raise ConfigError(
                f"data split {split!r}: {folder} has {', '.join(sorted(info.splits))}. "
                "Name one of them."
            )
        self.features = dict(info.features.items())
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
        self._length = info.splits[split].num_examples
        self._encoded = None
        if file_format == "tfrecord":
            self._encoded = TFRecordReader(shards, info.splits[split].shard_lengths)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._example is None:
            self._example = self._open()
        return self._example(index)

    def where(self, index: int) -> str:
        """Where a record lies, in words."""
        return f"{self.folder}, {self.split} {index}"

    def _open(self) -> Callable[[int], dict[str, Any]]:
        import tensorflow_datasets as tfds

        builder: Any = tfds.builder_from_directory(self.folder)
        kept = {"image", "label_map"} & self.features.keys()
        decoders = {name: tfds.decode.SkipDecoding() for name in kept}
        if self._encoded is None:
            return builder.as_data_source(self.split, decoders=decoders).__getitem__
        encoded = self._encoded
        features: Any = builder.info.features
        return lambda index: features.deserialize_example_np(encoded[index], decoders=decoders)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_example": None}
