"""The digits builder: counts, stratification, pixels, reuse."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from cropr_jax.data import digits, preprocess
from cropr_jax.data.open import open_source
from cropr_jax.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_split_is_fixed_disjoint_complete_and_stratified():
    labels = load_digits().target
    train, test = digits.stratified_split(labels)
    again = digits.stratified_split(labels)
    np.testing.assert_array_equal(train, again[0])
    assert sorted([*train, *test]) == list(range(1797))
    assert (len(train), len(test)) == (1438, 359)
    for label in range(10):
        share = (labels[test] == label).sum() / (labels == label).sum()
        assert abs(share - 0.2) < 0.01
    # Random, not by order: the set comes in blocks by writer.
    assert abs(test.mean() - 898) < 60


def test_prepared_once_silently_and_read_back(tmp_path, capfd):
    folder = digits.prepare(str(tmp_path))
    assert capfd.readouterr() == ("", "")
    stamp = (folder / "dataset_info.json").stat().st_mtime_ns
    assert digits.prepare(str(tmp_path)) == folder
    assert (folder / "dataset_info.json").stat().st_mtime_ns == stamp
    data = {"source": "tfds", "name": "cropr_digits", "dir": str(tmp_path)}
    train, test = open_source(data, "train"), open_source(data, "test")
    assert (len(train), len(test), train.num_classes) == (1438, 359, 10)

    known = load_digits()
    pictures = {
        digits.to_uint8(image).tobytes(): label
        for image, label in zip(known.images, known.target, strict=True)
    }
    for i in range(len(test)):
        image = np.asarray(preprocess.decode(test[i]["image"]))
        assert image.shape == (8, 8, 3) and (image == image[..., :1]).all()
        assert pictures[image[..., 0].tobytes()] == test[i]["label"]


@pytest.mark.slow
def test_two_processes_prepare_at_once(tmp_path):
    program = f"from cropr_jax.data import digits; print(digits.prepare({str(tmp_path)!r}))"
    runs = [
        subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    first, second = (run.communicate()[0].decode() for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert first == second and str(tmp_path) in first


def test_folder_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("CROPR_DATA_DIR", str(tmp_path))
    assert tmp_path in digits.prepare().parents


def test_values_span_the_range():
    np.testing.assert_array_equal(digits.to_uint8(np.array([0.0, 8.0, 16.0])), [0, 128, 255])


def test_a_home_that_cannot_be_written_costs_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", "/proc/none")
    monkeypatch.delenv("CROPR_DATA_DIR", raising=False)
    monkeypatch.setattr(digits.tempfile, "gettempdir", lambda: str(tmp_path))
    assert str(tmp_path) in digits._default()
    assert "warning: '/proc/none/.cache/cropr_jax/tfds' cannot be" in capsys.readouterr().err


def test_a_folder_that_was_named_and_cannot_be_written_is_one_line():
    with pytest.raises(ConfigError, match="data.dir: cannot write the digits to '/proc/none"):
        digits.prepare("/proc/none/digits")
