"""Training to segment: one device or many, micro-batches, resuming amid a curriculum, results."""

import json
import re

import jax
import numpy as np
import pytest
from tiny_config import MAP_SIZE as SIZE
from tiny_config import segmentation_config
from training import (
    assert_close,
    assert_same_state,
    make_step,
    mesh_of,
    records,
    start,
    state_in,
)

from cropr_jax import models
from cropr_jax.data.open import READERS
from cropr_jax.tasks.segmentation.task import Segmentation
from cropr_jax.train import loop, sharding
from cropr_jax.train.step import jit_evaluate, jit_train, run_key

BATCH = 16
RISING = {"epochs": 1, "start": 1}


def segmentation_step(mesh, accum_steps=1):
    fields = segmentation_config().model.to_dict() | {"drop_path": 0.2}
    return make_step(models.create(fields), mesh, accum_steps, task=Segmentation())


def make_batch(ignored):
    """With `ignored` images differ in the number of pixels that count."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 4, (BATCH, *SIZE)).astype(np.uint8)
    if ignored:
        labels[draw.random((BATCH, 1, 1)) > draw.random((BATCH, *SIZE))] = 255
    return {
        "image": draw.normal(size=(BATCH, *SIZE, 3)).astype(np.float32),
        "label": labels,
        "id": np.arange(BATCH, dtype=np.int32),
    }


def one_step(mesh, accum_steps=1, ignored=True):
    """State and metrics after a step, and the sums of an evaluation."""
    step = segmentation_step(mesh, accum_steps)
    state = start(step)
    shardings = sharding.state_shardings(state, mesh)
    state = jax.device_put(state, shardings)
    batch = make_batch(ignored)
    more = {
        "image": batch["image"][:, None],
        "corner": np.zeros((BATCH, 1, 2), np.int32),
        "resized": np.full((BATCH, 2), SIZE, np.int32),
        "size": np.full((BATCH, 2), SIZE, np.int32),
        "mask": np.ones(BATCH, np.float32),
    }
    evaluated = sharding.place(batch | more, mesh)
    evaluate = jit_evaluate(step, shardings.params)
    sums = jax.device_get(evaluate(state.params, evaluated, run_key(0)))
    state, metrics = jit_train(step, shardings)(state, sharding.place(batch, mesh), run_key(0))
    return jax.device_get(state), jax.device_get(metrics), sums


@pytest.mark.slow
def test_devices_change_nothing():
    """The mean over pixels that count is that of the whole batch, wherever they lie."""
    state, metrics, sums = one_step(mesh_of(1, 1))
    cut, cut_metrics, cut_sums = one_step(mesh_of(4, 2))
    assert_close(cut, state, atol=1e-4)
    for name, value in metrics.items():
        np.testing.assert_allclose(cut_metrics[name], value, rtol=1e-4, err_msg=name)
    np.testing.assert_array_equal(cut_sums["confusion"], sums["confusion"])
    assert sums["confusion"].sum() == (make_batch(True)["label"] != 255).sum()


@pytest.mark.slow
def test_windows_are_evaluated_alike_on_any_devices():
    """Of some images one window, of some two; what no image has is not there."""
    batch = make_batch(True)
    second = np.random.default_rng(1).normal(size=batch["image"].shape).astype(np.float32)
    none = np.full_like(second, 7.0)
    resized = np.where(np.arange(BATCH)[:, None] % 2, (8, 12), (8, 20)).astype(np.int32)
    corner = np.zeros((BATCH, 3, 2), np.int32)
    corner[:, 1] = np.where(np.arange(BATCH)[:, None] % 2, (8, 12), (0, 8))
    corner[:, 2] = resized
    batch |= {
        "image": np.stack([batch["image"], second, none], 1),
        "corner": corner,
        "resized": resized,
        "size": np.full((BATCH, 2), SIZE, np.int32),
        "mask": (np.arange(BATCH) < BATCH - 1).astype(np.float32),
    }
    found = []
    for mesh in (mesh_of(1, 1), mesh_of(4, 2)):
        step = segmentation_step(mesh)
        state = start(step)
        shardings = sharding.state_shardings(state, mesh)
        state = jax.device_put(state, shardings)
        evaluate = jit_evaluate(step, shardings.params)
        placed = sharding.place(batch, mesh)
        found.append(jax.device_get(evaluate(state.params, placed, run_key(0))))
    alone, spread = found
    np.testing.assert_array_equal(spread["confusion"], alone["confusion"])
    np.testing.assert_allclose(spread["loss"], alone["loss"], rtol=1e-5)
    assert alone["count"] == BATCH - 1
    # Without their second window the wide images would be seen otherwise.
    batch["corner"][:, 1] = resized
    batch["resized"][:] = (8, 12)
    other = jax.device_get(evaluate(state.params, sharding.place(batch, mesh), run_key(0)))
    assert other["loss"] != alone["loss"]


@pytest.mark.slow
def test_micro_batches_are_slices_of_the_targets():
    """Where all have as many pixels that count."""
    state, metrics, _ = one_step(mesh_of(1, 1), ignored=False)
    cut, cut_metrics, _ = one_step(mesh_of(1, 1), accum_steps=4, ignored=False)
    assert_close(cut, state, atol=1e-4)
    np.testing.assert_allclose(cut_metrics["loss"], metrics["loss"], rtol=1e-4)


@pytest.fixture(scope="module", autouse=True)
def one_by_one():
    """Collectives of eight devices on a few cores may lock when several steps are under way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "IN_FLIGHT", 0)
        yield


@pytest.fixture(scope="module")
def opened():
    """Splits that a reader was opened for, one after the other."""
    found, fake = [], READERS["fake_segmentation"]

    def counted(data, split):
        found.append(split)
        return fake(data, split)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(READERS, "fake_segmentation", counted)
        yield found


@pytest.fixture(scope="module")
def whole(tmp_path_factory, opened):
    """A run with a curriculum that was not interrupted, and the splits that it opened."""
    workdir = tmp_path_factory.mktemp("whole")
    opened.clear()
    result = loop.train(segmentation_config(RISING), workdir)
    return workdir, result, tuple(opened)


@pytest.mark.slow
def test_what_a_run_leaves(whole):
    workdir, result, _ = whole
    assert set(result["metrics"]["test"]) == {"miou", "macc", "aacc", "loss", "examples"}
    assert result["metrics"]["test"]["examples"] == 21
    classes = json.loads((workdir / "result.json").read_text())["per_class"]["test"]
    assert list(classes) == [f"class {i}" for i in range(4)]
    known = [row["iou"] for row in classes.values() if row["iou"] is not None]
    assert np.mean(known) == pytest.approx(result["metrics"]["test"]["miou"])
    assert (workdir / "segmentation.png").stat().st_size > 0
    # After the first epoch fewer tokens were pruned: that is no measure for the best.
    assert result["best"]["step"] == 8


@pytest.mark.slow
def test_each_split_is_opened_once(whole, opened):
    """For all that a training does with it, and for all that an evaluation does."""
    workdir, result, in_training = whole
    assert in_training == ("train", "test")
    opened.clear()
    again = loop.evaluate(segmentation_config(RISING), workdir)
    assert opened == ["train", "test"]
    assert {"step": again["step"], **again["metrics"]["test"]} == result["best"]


@pytest.mark.slow
def test_resumed_amid_the_curriculum(whole, tmp_path, monkeypatch, capsys):
    """Stopped while fewer tokens are pruned, and again after it: the same run."""
    config = segmentation_config(RISING)
    for stop in (2, 6):
        with monkeypatch.context() as patch:
            patch.setattr(loop.Preemption, "at", lambda self, step, stop=stop: step == stop)
            assert loop.train(config, tmp_path) is None
    result = loop.train(config, tmp_path)
    told = capsys.readouterr().out
    # Each schedule once in every start that meets it.
    compiled = re.findall(r"Compiled the training step of step (\d) on, (\d+) patches left", told)
    assert compiled == [("1", "22"), ("3", "22"), ("5", "20"), ("7", "20")]
    assert "Resumes after step 6" in told and "R 1 in the first 1 epochs" in told
    workdir, expected, _ = whole
    assert result["metrics"] == expected["metrics"]
    assert_same_state(state_in(tmp_path, 8), state_in(workdir, 8))
    assert records(tmp_path)[-1] == records(workdir)[-1]
