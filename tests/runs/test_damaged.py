"""Work directories that are damaged: one line that says what to do."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import tiny_config
from conftest import environment, random_params

import cropr_jax
from cropr_jax.errors import ConfigError
from cropr_jax.runs import directory
from cropr_jax.runs.writer import Checkpoints
from cropr_jax.train import fields, loop, recipe
from cropr_jax.train.run import Run
from cropr_jax.train.state import create_state


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two steps of a run, the first of them the best."""
    path = tmp_path_factory.mktemp("run")
    resolved = recipe.resolve(tiny_config.get_config("reduction=random"))
    loop._claim(path, resolved)
    params = random_params(resolved.model)
    step = resolved.training
    state = create_state(params, step.optimizer, step.trainable, False, None)
    with Checkpoints(path, "top1") as saved:
        for number, top1 in ((3, 0.9), (4, 0.1)):
            saved.save(number, state._replace(step=jax.numpy.asarray(number)))
            saved.rank(number, {"top1": top1})
    return path


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


WRONG = [b"", b"[]", b"{", b"null", b"3", b'{"model": 3}', b'{"task": "classification"}', b"\xff"]


@pytest.mark.parametrize("content", WRONG)
@pytest.mark.parametrize("read", [cropr_jax.load, lambda path: directory.step_directory(path)])
def test_a_damaged_config(run, content, read):
    (run / "config.json").write_bytes(content)
    (run / "run.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json") as said:
        read(run)
    assert "\n" not in str(said.value)


ODD = [b"", b"[]", b"{", b'{"class_names": 3}', b'{"class_names": [1]}']


@pytest.mark.parametrize("content", ODD)
def test_a_damaged_description(run, content):
    (run / "run.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.json") as said:
        cropr_jax.load(run)
    assert "\n" not in str(said.value)


METADATA = {
    "none": Path.unlink,
    "half": half,
    "empty": lambda path: path.write_text(""),
    "no JSON": lambda path: path.write_text("<html>"),
}


@pytest.mark.parametrize("damage", METADATA)
def test_a_checkpoint_without_its_list_of_arrays(run, damage):
    """The other step is named, from which one can go on."""
    METADATA[damage](run / "checkpoints" / "3" / "state" / "_METADATA")
    with pytest.raises(ConfigError, match=r"checkpoints/3'.*go on from step 4, which") as said:
        cropr_jax.load(run)
    assert "\n" not in str(said.value)
    METADATA[damage](run / "checkpoints" / "4" / "state" / "_METADATA")
    resumed = Run(recipe.resolve(tiny_config.get_config("reduction=random")))
    with pytest.raises(ConfigError, match=r"checkpoints/4'.*go on from step 3, which"):
        resumed.restore(run / "checkpoints" / "4")


@pytest.mark.slow
@pytest.mark.parametrize("damage", [half, Path.unlink])
def test_a_checkpoint_without_its_arrays(run, damage):
    """In a process of its own: threads of Orbax's reader speak up later."""
    for file in list((run / "checkpoints" / "3" / "state").rglob("d/*")):
        damage(file)
    program = f"""
import cropr_jax
from cropr_jax.errors import CheckpointError
try:
    cropr_jax.load({str(run)!r})
except CheckpointError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "checkpoints/3'" in done.stdout and done.stdout.count("\n") == 1
    assert "to go on from step 4, which is there too, remove this one" in done.stdout


def test_other_classes_than_the_run_has(run):
    """Nothing is overwritten."""
    about = json.loads((run / "run.json").read_text())
    assert len(about["class_names"]) == 4
    (run / "run.json").write_text(json.dumps(about | {"class_names": ["a", "b", "c", "d"]}))
    before = (run / "run.json").read_text()
    config = tiny_config.get_config("reduction=random")
    for start in (loop.train, loop.evaluate):
        with pytest.raises(ConfigError, match="are not among the 4 of the run"):
            start(config, run)
    assert (run / "run.json").read_text() == before
    assert fields.plain(config)["data"]["num_classes"] == 4
