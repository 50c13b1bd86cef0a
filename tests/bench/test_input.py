"""The input benchmark runs a real worker and says how many a rate needs."""

import pytest

from cropr_jax.bench import input as bench_input

CONFIG = {
    "task": "classification",
    "seed": 0,
    "batch_size": 16,
    "data": {
        "source": "fake",
        "num_examples": 64,
        "image_size": (16, 16),
        "num_classes": 2,
        "train": "train",
        "workers": 1,
    },
    "preprocess": {
        "res": (8, 8),
        "mean": (0.5,) * 3,
        "std": (0.5,) * 3,
        "interpolation": "bicubic",
        "crop_ratio": 1.0,
        "train": {"crop_scale": (0.08, 1.0), "flip": True, "rand_augment": "", "erase": 0.0},
    },
}


@pytest.mark.slow
def test_one_worker_is_measured():
    rates = bench_input.input_benchmark(CONFIG, target=1000.0, seconds=0.5)
    assert rates.per_worker > 10
    assert (
        (rates.workers_needed - 1) * rates.per_worker
        < 1000
        <= (rates.workers_needed * rates.per_worker)
    )
    text = str(rates)
    assert "images/s per worker" in text and f"{rates.workers_needed} workers" in text


def test_text_names_all_numbers():
    rates = bench_input.InputRates(100.0, 4, 360.0, 546.0, 7, 16)
    assert str(rates).splitlines() == [
        "input pipeline: 100.0 images/s per worker",
        "4 workers together: 360.0 images/s",
        "for 546 images/s: 7 workers (this machine has 16 cores)",
    ]
