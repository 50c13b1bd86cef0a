"""Runs that go wrong, in this process: what is kept of them, what is said, and that they go on."""

import os

import numpy as np
import pytest
import tiny_config
from PIL import Image
from training import mesh_of, records, state_in

from cropr_jax.core.trees import flatten, unflatten
from cropr_jax.errors import CheckpointError, ExampleError
from cropr_jax.runs.writer import Checkpoints
from cropr_jax.tasks.classification.predictor import ClassificationPredictor
from cropr_jax.train import assemble, loop, recipe, sharding
from cropr_jax.train.run import Run


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """Collectives of eight devices on a few cores may lock when several steps are under way."""
    monkeypatch.setattr(sharding, "make_mesh", lambda **_: mesh_of(1, 1))
    for module in (assemble, recipe):
        monkeypatch.setattr(module, "device_count", lambda: 1)


def folder_of_images(path):
    """Eight images in two classes for training, and four for a test; the config that reads them."""
    for split, count in (("train", 4), ("test", 2)):
        for name, value in (("bee", 60), ("cat", 200)):
            (path / split / name).mkdir(parents=True)
            for i in range(count):
                image = Image.new("RGB", (8, 8), (value, 10 * i, 0))
                image.save(path / split / name / f"{i}.png")
    config = tiny_config.get_config("reduction=random")
    config.batch_size = config.eval_batch_size = 8
    config.total_epochs, config.log_every, config.checkpoint_every = 3.0, 1, 10
    config.model.num_classes = 0
    source = {"source": "image_folder", "dir": str(path), "env": "", "name": "", "train": "train"}
    config.data = source | {"eval": {"test": "test"}, "workers": 0}
    return config


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"<html>no such page</html>", None])
@pytest.mark.parametrize("where", ["train/bee/2.png", "test/cat/1.png"])
def test_an_example_that_cannot_be_read(tmp_path, where, content):
    """One line with its name; what was trained is kept, and goes on once the file is mended."""
    config = folder_of_images(tmp_path / "data")
    file = tmp_path / "data" / where
    good = file.read_bytes()
    file.write_bytes(good[:40] if content is None else content)
    with pytest.raises(ExampleError, match=f"{where}: the example cannot be read"):
        loop.train(config, tmp_path / "run")
    # The batches of three steps are all of the same eight images.
    saved = [] if where.startswith("train") else ["1"]
    assert os.listdir(tmp_path / "run" / "checkpoints") == saved
    file.write_bytes(good)
    result = loop.train(config, tmp_path / "run")
    assert result["metrics"]["test"]["examples"] == 4
    steps = [row["step"] for row in records(tmp_path / "run") if row["split"] == "test"]
    assert steps == [1, 2, 3]


@pytest.mark.slow
def test_a_run_that_diverges(tmp_path):
    """Nothing that is not finite is kept, and the status is not that of a success."""
    config = tiny_config.get_config("reduction=random")
    config.checkpoint_every = 1
    config.optimizer.update({"lr": 10.0, "lr_reference": 1, "weight_decay": 10.0})
    with pytest.raises(FloatingPointError, match=r"the .* is (nan|inf) at step [2-8]: nothing is"):
        loop.train(config, tmp_path)
    last = max(map(int, os.listdir(tmp_path / "checkpoints")))
    assert last < 8 and all(np.isfinite(x).all() for x in state_in(tmp_path, last).values())
    assert not (tmp_path / "result.json").exists()
    with pytest.raises(FloatingPointError):
        loop.train(config, tmp_path)


@pytest.mark.slow
def test_a_checkpoint_that_is_not_finite_is_refused(tmp_path):
    config = tiny_config.get_config("reduction=random")
    config.total_steps = 2
    run = Run(recipe.resolve(config))
    state = run.initial_state()
    broken = flatten(state.params)
    broken["head/bias"] = broken["head/bias"] + np.nan
    with Checkpoints(tmp_path, "top1") as saved:
        saved.save(1, state._replace(params=unflatten(broken)))
    with pytest.raises(CheckpointError, match="'params/head/bias' is not finite there. Remove"):
        loop.train(config, tmp_path)


@pytest.mark.slow
def test_a_picture_that_fails_costs_a_warning(tmp_path, monkeypatch, capsys):
    config = tiny_config.get_config("reduction=random")
    config.total_steps = 1
    kind = ClassificationPredictor
    monkeypatch.setattr(kind, "explain", lambda *_: 1 / 0)
    assert loop.train(config, tmp_path)["step"] == 1
    assert (tmp_path / "result.json").exists()
    said = capsys.readouterr().out
    assert "warning: the picture of the run was not drawn (ZeroDivisionError: division by" in said
