"""All that reads a work directory takes the step that is best by the metric of its run."""

import json

import jax
import numpy as np
import pytest
from conftest import random_params
from PIL import Image
from tiny_config import MAP_SIZE, segmentation_config
from training import start

import cropr_jax
from cropr_jax import explain, export
from cropr_jax.convert.load import load
from cropr_jax.core.trees import flatten
from cropr_jax.runs import checkpoints, directory
from cropr_jax.runs.writer import Checkpoints
from cropr_jax.train import initial, loop, recipe
from cropr_jax.train.run import Run

BEST, LAST = 2, 5
# Pixel accuracy, and the metric of another task, would choose the last step.
METRICS = {
    BEST: {"miou": 0.5, "aacc": 0.6, "top1": 0.0, "loss": 1.0},
    LAST: {"miou": 0.4, "aacc": 0.9, "top1": 1.0, "loss": 0.5},
}


@pytest.fixture(scope="module")
def resolved():
    return recipe.resolve(segmentation_config())


@pytest.fixture(scope="module")
def best(resolved):
    """Flat parameters of the best step."""
    return flatten(random_params(resolved.model, BEST))


@pytest.fixture(scope="module", params=["metric", "no metric"])
def workdir(request, tmp_path_factory, resolved):
    """Of a run that wrote down its metric, and of one from before that was done."""
    path = tmp_path_factory.mktemp("run")
    loop._claim(path, resolved)
    about = json.loads((path / "run.json").read_text())
    assert about["metric"] == "miou"
    if request.param == "no metric":
        del about["metric"]
        (path / "run.json").write_text(json.dumps(about))
    state = start(resolved.training)
    with Checkpoints(path, "miou") as saved:
        for step, metrics in METRICS.items():
            params = random_params(resolved.model, step)
            saved.save(step, state._replace(params=params))
            if metrics:
                saved.rank(step, metrics)
    return path


@pytest.fixture
def read(monkeypatch):
    """Directories of the steps that parameters are read from."""
    found, restore = [], checkpoints.restore_params

    def noted(path, wanted, **more):
        found.append(path)
        return restore(path, wanted, **more)

    monkeypatch.setattr(checkpoints, "restore_params", noted)
    return found


def step_of(workdir, step=BEST):
    return workdir / "checkpoints" / str(step)


def test_step_directory(workdir):
    assert directory.metric(workdir) == "miou"
    assert directory.step_directory(workdir) == step_of(workdir)
    for step in METRICS:  # one that is named is taken, the last too
        assert directory.step_directory(step_of(workdir, step)) == step_of(workdir, step)


def test_predictor(workdir, best, read):
    predictor = cropr_jax.load(workdir)
    assert read == [step_of(workdir)]
    np.testing.assert_array_equal(predictor.params["head"]["kernel"], best["head/kernel"])
    cropr_jax.load(step_of(workdir, LAST))
    assert read[1:] == [step_of(workdir, LAST)]


def test_weights_to_start_from(workdir, best, resolved, read):
    loaded = load(str(workdir), resolved.model).params
    params, notes = initial.initial_params(str(workdir), resolved.model, jax.random.key(0))
    assert notes == [] and set(read) == {step_of(workdir)}
    for found in (loaded, flatten(params)):
        assert found.keys() == best.keys()
        for name, leaf in best.items():
            np.testing.assert_array_equal(found[name], leaf, err_msg=name)


def test_a_run_that_starts_from_it(workdir, best, read):
    config = segmentation_config()
    config.init = str(workdir)
    state = Run(recipe.resolve(config)).initial_state()
    assert set(read) == {step_of(workdir)}
    np.testing.assert_array_equal(state.params["head"]["kernel"], best["head/kernel"])


def test_picture(workdir, tmp_path, read):
    picture, image = str(tmp_path / "out.png"), str(tmp_path / "image.png")
    Image.fromarray(np.full((*MAP_SIZE, 3), 90, np.uint8)).save(image)
    explain.main(["--workdir", str(workdir), "--output", picture, image])
    assert read == [step_of(workdir)]


def test_exported(workdir, best, tmp_path, read):
    path = tmp_path / "model.cropr"
    export.main(["--workdir", str(workdir), str(path)])
    assert read == [step_of(workdir)]
    with np.load(path) as file:
        np.testing.assert_array_equal(file["params/head/kernel"], best["head/kernel"])


def test_evaluated(workdir, read):
    result = loop.evaluate(segmentation_config(), workdir)
    assert result["step"] == BEST and read == [step_of(workdir)]
