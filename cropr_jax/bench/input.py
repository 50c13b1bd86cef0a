"""How fast the input pipeline is, and how many workers a training rate needs.

Only the pipeline runs; no model, no accelerator.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# benbergner/cropr trains ViT-L with Cropr and LLF at this rate on one A100 (images/s, its log).
TARGET_RATE = 546.0


@dataclass(frozen=True)
class InputRates:
    """What `input_benchmark` measured.

    Attributes:
      per_worker: images/s of one worker process.
      workers: worker processes in the second measurement, 0 when there was none.
      together: images/s of all of them, or `per_worker` when there was one measurement.
      target: images/s that training needs.
      workers_needed: for the target, at the slower of the two rates per worker.
      cores: processor cores of this machine.
    """

    per_worker: float
    workers: int
    together: float
    target: float
    workers_needed: int
    cores: int

    def __str__(self) -> str:
        lines = [f"input pipeline: {self.per_worker:.1f} images/s per worker"]
        if self.workers:
            lines.append(f"{self.workers} workers together: {self.together:.1f} images/s")
        lines.append(
            f"for {self.target:.0f} images/s: {self.workers_needed} workers "
            f"(this machine has {self.cores} cores)"
        )
        return "\n".join(lines)


def input_benchmark(
    config: Mapping[str, Any], target: float = TARGET_RATE, seconds: float = 10.0
) -> InputRates:
    """Measures the training pipeline of a config: with one worker, then with `data.workers`.

    Reading, decoding, augmentation and the way to the main process are inside the clock; starting
    the workers and the first batches are not.

    Args:
      config: as for `cropr_jax.data.pipeline.train_batches`.
      target: images/s that training needs.
      seconds: length of each measurement, at least.

    Raises:
      ConfigError: the data set is missing, or the config cannot be read.
    """
    workers = config["data"]["workers"]
    single = _rate(config, 1, seconds)
    together = _rate(config, workers, seconds) if workers > 1 else single
    per_worker = min(single, together / workers) if workers > 1 else single
    return InputRates(
        per_worker=single,
        workers=workers if workers > 1 else 0,
        together=together,
        target=target,
        workers_needed=math.ceil(target / per_worker),
        cores=os.cpu_count() or 1,
    )


def _rate(config: Mapping[str, Any], workers: int, seconds: float) -> float:
    from cropr_jax import tasks
    from cropr_jax.data import pipeline
    from cropr_jax.data.open import Splits

    # Small batches, so that a short measurement holds many; the work for an image is the same.
    batch_size = min(config["batch_size"], 32)
    data = {**config["data"], "workers": workers}
    examples = tasks.create(config).training(config["preprocess"], Splits(data).train)
    batches = pipeline.train_batches({**config, "data": data, "batch_size": batch_size}, examples)
    try:
        # Workers fill their buffers while they start; these batches would count as if made in time.
        for _ in range(4 * workers):
            next(batches)
        start, images = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            images += len(next(batches)["id"])
        return images / (time.perf_counter() - start)
    finally:
        batches.close()
