"""A task that the project does not know, `tests/depth.py`, goes through all of it."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import depth
import numpy as np
import pytest
from conftest import REPOSITORY, environment
from depth_config import get_config
from PIL import Image

import cropr_jax
from cropr_jax import explain, tasks
from cropr_jax.bench import methods, report, throughput
from cropr_jax.compare.__main__ import main as compare
from cropr_jax.errors import ConfigError
from cropr_jax.train import evaluate, train

CONFIG = str(REPOSITORY / "tests" / "depth_config.py")
pytestmark = [
    pytest.mark.slow,  # whole runs; a minute together
    pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, and what it printed."""
    workdir = tmp_path_factory.mktemp("depth")
    return workdir, train(get_config(), workdir)


def test_the_page_shows_this_file():
    """`docs/adding_a_task.md` has all of it, as it stands."""
    source = Path(depth.__file__).read_text()
    page = (REPOSITORY / "docs" / "adding_a_task.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    for block in blocks:
        for part in re.split(r"\n{3,}", block.strip()):
            assert part in source, part
    shown = "".join(blocks)
    for block in re.split(r"\n{3,}", source.partition("\n@dataclasses")[2].strip()):
        assert block in shown, block


def test_one_file():
    assert len(Path(depth.__file__).read_text().splitlines()) <= 150


def test_learns_and_is_evaluated(run, capfd):
    workdir, result = run
    first, last = result["metrics"]["test"], evaluate(get_config(), workdir)["metrics"]["test"]
    assert first["examples"] == 21 and first.keys() == {"delta1", "mae", "examples"}
    # The mean depth is 5 m, the model's first answer 0.
    assert first["mae"] < 4.9
    best = json.loads((workdir / "result.json").read_text())["best"]
    assert last["delta1"] == pytest.approx(best["delta1"])
    assert "delta1 0.00%, mae" in capfd.readouterr().out  # fractions in per cent, others not


def test_its_metric_ranks(run):
    assert json.loads((run[0] / "run.json").read_text())["metric"] == "delta1"


def test_resumes_bit_equal(run, tmp_path):
    config = get_config()
    config.total_steps, config.total_epochs = 8, 2.0
    train(config, tmp_path)
    whole = (run[0] / "result.json").read_text()
    assert (
        json.loads(whole)["metrics"]
        == json.loads((tmp_path / "result.json").read_text())["metrics"]
    )


def test_predicts_and_is_drawn(run, tmp_path, capsys):
    workdir, _ = run
    predictor = cropr_jax.load(workdir)
    assert isinstance(predictor, depth.DepthPredictor)
    Image.fromarray(np.full((20, 30, 3), 90, np.uint8)).save(tmp_path / "scene.png")
    assert predictor([tmp_path / "scene.png"], preprocess=True).shape == (1, 4, 4)
    output = tmp_path / "out.png"
    explain.main(["--workdir", str(workdir), "--output", str(output), str(tmp_path / "scene.png")])
    assert output.exists() and (workdir / "depth.png").exists()
    assert "nearest" in capsys.readouterr().out


def test_is_exported(run, tmp_path):
    predictor = cropr_jax.load(run[0])
    predictor.export(tmp_path / "depth.cropr")
    images = np.full((2, 16, 16, 3), 90, np.uint8)
    found = cropr_jax.exported.load_exported(tmp_path / "depth.cropr")(images)
    np.testing.assert_allclose(found, predictor(images), atol=1e-5)


def test_is_carded(tmp_path, capsys):
    config = get_config()
    config.total_steps = 1
    train(config, tmp_path)
    text = capsys.readouterr().out
    assert re.search(r"losses +L1, auxiliary loss of each site", text)
    assert re.search(r"depth +of patches, in metres", text)


@pytest.mark.parametrize("stage", ["slim", "train"])
def test_is_timed(stage):
    settings = methods.Settings(("none", "cropr"), batch_size=8, rounds=1, stages=(stage,))
    rows = throughput.measure(CONFIG, settings)
    assert [row["reduction"] for row in rows] == ["none", "cropr"]
    assert all(row["images_per_second"] > 0 for row in rows) and report.table(rows, {})


@pytest.mark.slow
def test_is_compared(tmp_path):
    words = ["--config", CONFIG, "--reductions", "none,cropr", "--rounds", "0"]
    out = tmp_path / "out"
    compare([*words, "--workdir", str(tmp_path / "runs"), "--out", str(out)])
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [row["metric"] for row in rows] == ["delta1", "delta1"]
    assert "| delta 1 % |" in out.with_suffix(".md").read_text()


def test_runlocal_has_its_made_up_data():
    assert get_config("runlocal").data.source == "scenes"


def test_other_labels_are_refused(tmp_path):
    config = get_config()
    config.data.update({"source": "fake", "num_classes": 1})
    with pytest.raises(ConfigError, match="labels are one class an image.*needs depth maps"):
        train(config, tmp_path)


@pytest.mark.slow
def test_commands_find_it_by_its_module(run):
    """A program that never heard of it, as `explain` in a new process."""
    program = f"import cropr_jax; print(type(cropr_jax.load({str(run[0])!r})).__name__)"
    env = environment()
    env["PYTHONPATH"] += f":{REPOSITORY / 'tests'}"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "DepthPredictor", done.stderr


def test_unknown_tasks():
    for name in ("detection", "nowhere:height"):
        with pytest.raises(ConfigError, match="config.task"):
            tasks.get(name)


def sources():
    for path in sorted((REPOSITORY / "cropr_jax").rglob("*.py")):
        own = path.relative_to(REPOSITORY / "cropr_jax").parts
        if own[0] != "tasks" or len(own) == 2:
            yield path, path.read_text()


def test_nobody_asks_a_task_for_its_name():
    """No comparison with a name, no test of a class or of the number of axes of a label."""
    names = {name for name in tasks.TASKS if name != depth.Depth.name}
    classes = {task.head.__name__ for task in tasks.TASKS.values()}
    for path, text in sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Compare):
                words = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
                assert not words & names, (path, node.lineno)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                asked = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                asked |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                assert not asked & classes, (path, node.lineno)
        assert not re.search(r"labels?(\"\])?\.ndim", text), path
