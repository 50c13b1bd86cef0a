"""What a run ends with: a JSON file, tables, and a picture of a few images."""

import json

import jax
import numpy as np
import pytest
import tiny_config

from cropr_jax import models
from cropr_jax.host.version import versions
from cropr_jax.tasks.classification.task import Classification
from cropr_jax.tasks.segmentation.task import Segmentation
from cropr_jax.train import recipe, results
from cropr_jax.train.card import facts
from cropr_jax.train.run import Evaluation

METRICS = {"test": {"top1": 0.5, "top5": 1.0, "loss": 1.25, "examples": 21}}


@pytest.fixture(scope="module")
def resolved():
    return recipe.resolve(tiny_config.get_config())


def test_the_file(tmp_path, resolved):
    """All that one needs to know where a number comes from."""
    path = tmp_path / "made" / "result.json"
    best = {"step": 4, "top1": 0.75}
    returned = results.finish(path, resolved, Evaluation(METRICS, {}), step=8, best=best)
    written = json.loads(path.read_text())
    assert written == json.loads(json.dumps(returned))
    known = {"metrics", "step", "best", "devices", "config", "versions", "revision"}
    costs = facts(resolved)
    assert written.keys() == known | costs.keys()
    assert (written["metrics"], written["step"], written["best"]) == (METRICS, 8, best)
    assert {name: written[name] for name in costs} == costs
    assert written["config"] == resolved.config and written["versions"] == versions()
    assert written["devices"] == f"8 x {jax.devices()[0].device_kind}"


def test_the_table(tmp_path, resolved, capsys):
    path = tmp_path / "result.json"
    other = METRICS | {"few": {"top1": 1.0, "top5": 1.0, "loss": 0.125, "examples": 5}}
    results.finish(path, resolved, Evaluation(other, {}))
    costs = facts(resolved)
    assert capsys.readouterr().out.splitlines() == [
        "Result",
        "  test                 top1 50.00%, top5 100.00%, loss 1.25, examples 21",
        "  few                  top1 100.00%, top5 100.00%, loss 0.125, examples 5",
        "  total pruning ratio  25.0%",
        f"  parameters           {costs['params']:,} in training, {costs['params_slim']:,} slim",
        f"  written              {path}",
    ]


def test_the_table_of_classes(tmp_path, capsys):
    """Fractions in per cent; a class of which there is no pixel has a dash."""
    resolved = recipe.resolve(tiny_config.segmentation_config())
    classes = {"sky": {"iou": 0.5, "accuracy": 0.625}, "car": {"iou": None, "accuracy": None}}
    metrics = {"test": {"miou": 0.5, "examples": 21}}
    path = tmp_path / "result.json"
    results.finish(path, resolved, Evaluation(metrics, {"test": classes}))
    assert json.loads(path.read_text())["per_class"] == {"test": classes}
    assert capsys.readouterr().out.splitlines()[:5] == [
        "Classes of 'test'",
        "  sky  iou 50.00%, accuracy 62.50%",
        "  car  iou -, accuracy -",
        "Result",
        "  test                 miou 50.00%, examples 21",
    ]


def test_only_the_first_process_writes(tmp_path, resolved, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    path = tmp_path / "result.json"
    returned = results.finish(path, resolved, Evaluation(METRICS, {}))
    assert returned["metrics"] == METRICS
    assert not path.exists() and capsys.readouterr().out == ""


class Painter:
    """A predictor that draws nothing and tells what it was asked for."""

    name = "seen.png"
    made: list = []

    @classmethod
    def picture(cls, model):
        return cls.name

    @classmethod
    def from_model(cls, model, params, preprocess, class_names):
        cls.made.append((model, params, preprocess, class_names))
        return cls()

    def explain(self, images, path, truths):
        self.made.append((images, path, truths))


@pytest.fixture
def painter(monkeypatch):
    """The predictor of classification, for a while."""
    kind = type("Painter", (Painter,), {"made": []})
    monkeypatch.setattr(Classification, "predictor", kind)
    return kind


def few(split):
    config = tiny_config.get_config()
    with config.unlocked():
        config.data.eval = {"test": split}
        config.data.num_classes = 3
        config.model.num_classes = 3
    return recipe.resolve(config)


@pytest.mark.parametrize(("split", "chosen"), [
    # Spread from the first example to the last.
    ("test[64:85]", [64, 68, 72, 76, 80, 84]),
    ("test[10:13]", [10, 11, 12]),
    ("test[7:8]", [7]),
])  # fmt: skip
def test_a_few_images_are_drawn(tmp_path, painter, capsys, split, chosen):
    resolved = few(split)
    params = {"head": jax.numpy.ones(2)}
    results.draw(tmp_path, resolved, params)
    (model, given, preprocess, names), (images, path, truths) = painter.made
    assert model is resolved.model and preprocess == resolved.config["preprocess"]
    assert isinstance(given["head"], np.ndarray)  # of which each process has all, not a part
    assert names == ("class 0", "class 1", "class 2")
    reader = resolved.splits.train.reader
    for image, truth, index in zip(images, truths, chosen, strict=True):
        expected, label = reader(index)
        np.testing.assert_array_equal(image, expected)
        assert truth == label == index % 3
    assert path == tmp_path / "seen.png"
    assert capsys.readouterr().out == f"Drew {len(chosen)} images of 'test' to {path}\n"


def test_where_there_is_no_picture_nothing_is_drawn(tmp_path, resolved, painter, capsys):
    painter.name = ""
    results.draw(tmp_path, resolved, {})
    assert painter.made == [] and capsys.readouterr().out == ""


def test_of_several_processes_none_has_all_parameters(tmp_path, resolved, painter, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    results.draw(tmp_path, resolved, {})
    assert painter.made == []


def test_which_models_have_a_picture(resolved):
    """Classification shows what was pruned, segmentation what was found as well."""
    whole = models.unpruned(resolved.model)
    assert Classification.predictor.picture(resolved.model) == "pruning.png"
    assert Classification.predictor.picture(whole) == ""
    assert Segmentation.predictor.picture(whole) == "segmentation.png"
