"""Records of classification to examples: an image and its class."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cropr_jax.data import preprocess
from cropr_jax.data.records import Example, Record


def train_transform(
    settings: Mapping[str, Any],
) -> Callable[[Record, np.random.Generator], Example]:
    """(record, rng) -> {'image' float32 [h, w, 3], 'label' int32}, as `preprocess` makes it."""
    return functools.partial(_train, preprocess.train_transform(settings))


def eval_transform(settings: Mapping[str, Any]) -> Callable[[Record], Example]:
    """Record -> the same, without chance."""
    return functools.partial(_eval, preprocess.eval_transform(settings))


def filler(settings: Mapping[str, Any]) -> Example:
    """An example that fills a batch: all 0."""
    return {"image": np.zeros((*settings["res"], 3), np.float32), "label": np.int32(0)}


def _train(
    transform: Callable[[Record, np.random.Generator], np.ndarray],
    record: Record,
    rng: np.random.Generator,
) -> Example:
    return {"image": transform(record, rng), "label": np.int32(record["label"])}


def _eval(transform: Callable[[Record], np.ndarray], record: Record) -> Example:
    return {"image": transform(record), "label": np.int32(record["label"])}
