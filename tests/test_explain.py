"""The picture and the prediction for any image."""

import numpy as np
import pytest
from PIL import Image
from tasks.test_predictor import CONFIG, PREPROCESS, make

from cropr_jax import explain
from cropr_jax.errors import ConfigError
from cropr_jax.tasks.classification.predictor import ClassificationPredictor


def test_explain(tmp_path, monkeypatch, capsys):
    predictor = ClassificationPredictor.from_model(*make(), PREPROCESS, tuple("abcdefg"))
    monkeypatch.setattr(explain, "load", {"run": predictor}.get)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "cat.png")
    output = tmp_path / "out.png"
    explain.main(["--workdir", "run", "--output", str(output), str(tmp_path / "cat.png")])
    with Image.open(output) as picture:
        assert picture.width > 200
    line = capsys.readouterr().out.splitlines()[0]
    (best,) = predictor.top(predictor([pixels], preprocess=True))
    assert line.startswith(f"{tmp_path / 'cat.png'}: {best[0][0]} {best[0][1]:.1%}, ")
    assert line.count("%") == 5

    found = predictor.explain([pixels], output, [2])
    assert found[0][0][0] == best[0][0]


def test_unpruned_model_has_nothing_to_show(tmp_path):
    model, params = make(reduction=CONFIG["reduction"] | {"name": "none"})
    predictor = ClassificationPredictor.from_model(model, params, PREPROCESS)
    with pytest.raises(ConfigError, match="'none' prunes no patches"):
        predictor.explain([np.zeros((20, 30, 3), np.uint8)], tmp_path / "out.png")


@pytest.mark.parametrize(("output", "message"), [
    ("none/x.png", "'none' is no folder that can be written"),
    ("x.foo", "expected a name that ends in one of .eps"),
    ("x", "expected a name that ends in one of"),
])  # fmt: skip
def test_an_output_that_cannot_be_is_refused_first(output, message, monkeypatch):
    monkeypatch.setattr(explain, "load", lambda _: pytest.fail("loaded"))
    with pytest.raises(ConfigError) as said:
        explain.main(["--workdir", "run", "--output", output, "cat.png"])
    assert message in str(said.value)
