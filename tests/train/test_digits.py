"""One real training run: the README's main job, cut short, from data to picture and predictor."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import environment
from PIL import Image

import cropr_jax
from cropr_jax.data.open import open_source

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_digits_are_learned_and_served(tmp_path):
    workdir = tmp_path / "run"
    command = [sys.executable, "run.py", "--config", "configs/digits.py", "--workdir", str(workdir)]
    # As a user's is compiled: 200 steps take longer than optimizing them.
    optimized = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}
    done = subprocess.run(
        [*command, "--config.total_steps=200", "--cache_dir="],
        cwd=ROOT,
        env=environment(CROPR_DATA_DIR=str(tmp_path), **optimized),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((workdir / "result.json").read_text())
    assert result["metrics"]["test"]["examples"] == 359
    assert result["metrics"]["test"]["top1"] > 0.6  # chance is 0.1; a whole run reaches 0.97
    assert result["tpr"] >= 0.75
    with Image.open(workdir / "pruning.png") as picture:
        assert picture.size[0] > 300

    predictor = cropr_jax.load(workdir)
    data = {"source": "tfds", "name": "cropr_digits", "dir": str(tmp_path)}
    source = open_source(data, "test")
    records = [source[i] for i in range(len(source))]
    images = np.stack([grey_to_rgb(record["image"]) for record in records])
    labels = np.array([record["label"] for record in records])
    right = np.asarray(predictor(images)).argmax(1) == labels
    best = result["best"]["top1"] if "best" in result else result["metrics"]["test"]["top1"]
    assert right.mean() == pytest.approx(best, abs=1e-6)


def grey_to_rgb(encoded):
    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
