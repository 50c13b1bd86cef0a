"""The comparison: every seed is kept, nothing is run twice, the table says what the runs said."""

import csv
import dataclasses
import json
import statistics
from functools import partial
from pathlib import Path

import jax
import pytest

from cropr_jax.compare import __main__ as compare
from cropr_jax.compare import plan, table
from cropr_jax.errors import ConfigError
from cropr_jax.reducers.registry import REDUCERS
from cropr_jax.tasks.classification.task import Classification
from cropr_jax.visualize import seeds, tradeoff

CONFIG = str(Path(__file__).resolve().parents[2] / "configs" / "digits.py") + ":runlocal"
TOP1 = Classification.metric
SMALL = ("--config.model.width=16", "--config.model.heads=2", "--config.model.depth=3")
# ml_collections loads the file in a way that Python is giving up.
pytestmark = pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")


def arguments(tmp_path, *more):
    words = ["--config", CONFIG, "--workdir", str(tmp_path / "runs"), "--out", str(tmp_path / "t")]
    return [*words, "--batch_size=2", *SMALL, *more]


@pytest.mark.slow
def test_table(tmp_path, capsys, monkeypatch):
    shallow = partial(arguments, tmp_path, "--config.model.depth=2", "--rounds=1")
    compare.main(shallow("--reductions=none,random"))
    started = []
    monkeypatch.setattr(compare.cli, "say", started.append)
    compare.main(shallow("--reductions=random", "--seeds=1"))
    assert [line for line in started if line.startswith("run ")] == [
        "run 3 of 3: random-per_block, seed 1"
    ]
    runs = tmp_path / "runs"
    found = [
        json.loads((runs / "random-per_block" / f"seed_{seed}" / "result.json").read_text())
        for seed in (0, 1)
    ]
    accuracies = [result["metrics"]["test"]["top1"] for result in found]
    with open(tmp_path / "t.csv", newline="") as file:
        none, random = csv.DictReader(file)
    assert none["reduction"] == "none" and none["seed_1"] == "" and float(none["ratio"]) == 1
    assert [float(random[f"seed_{seed}"]) for seed in (0, 1)] == accuracies
    assert float(random["mean"]) == pytest.approx(statistics.mean(accuracies))
    assert float(random["images_per_second"]) > 0
    assert random["rate"] == "12"
    assert random["tokens"] == " ".join(map(str, found[0]["tokens"]))
    assert (tmp_path / "t.png").stat().st_size > 1000
    assert (tmp_path / "t_seeds.png").stat().st_size > 1000
    assert capsys.readouterr().out.count("| random |") == 2

    before = (tmp_path / "t.csv").read_text()
    with pytest.raises(ConfigError, match=r"was run with config.optimizer.lr 0.008, now it is 1"):
        compare.main(shallow("--reductions=none", "--config.optimizer.lr=1.0"))
    assert (tmp_path / "t.csv").read_text() == before


@pytest.mark.slow
def test_a_second_seed_compiles_nothing(tmp_path):
    """Its programs are those of the first, up to the last scalar; only their arguments differ."""
    misses = []

    def listen(event, **_):
        if event == "/jax/compilation_cache/cache_misses":
            misses.append(event)

    jax.monitoring.register_event_listener(listen)
    words = ("--reductions=cropr", "--rounds=0", "--config.model.width=24")
    compare.main(arguments(tmp_path, *words))
    assert misses
    misses.clear()
    compare.main(arguments(tmp_path, *words, "--seeds=1"))
    assert (tmp_path / "runs" / "cropr-per_block" / "seed_1" / "result.json").exists()
    assert not misses


def test_mistakes_come_before_training(tmp_path):
    with pytest.raises(ConfigError, match="reduction: found 'dropr', expected one of"):
        compare.main(arguments(tmp_path, "--reductions=none,dropr"))
    with pytest.raises(ConfigError, match="unknown argument '--seed=1'"):
        compare.main(arguments(tmp_path, "--reductions=none", "--seed=1"))
    assert not (tmp_path / "runs").exists()


def test_unreachable_schedule_is_a_row(tmp_path):
    rows = plan.entries(("none", "random"), ("per_block",), (1, 900))
    assert [row.label for row in rows] == ["none", "random-per_block-r1", "random-per_block-r900"]
    planned = plan.make(CONFIG, SMALL, dict.fromkeys(rows, (0,)), tmp_path)
    assert list(planned.runs) == rows[:2]
    assert "block 1" in planned.unreachable[rows[2]]
    row = dataclasses.asdict(rows[2]) | {"unreachable": planned.unreachable[rows[2]]}
    text = table.markdown([row])
    assert "unreachable: config.model.reduction (rate 900)" in text


def test_fusions_are_rows_and_some_bring_their_method(tmp_path):
    rows = plan.entries(("none", "cropr"), ("per_block",), (2,), ("llf", "dtop"))
    assert [row.label for row in rows] == [
        "none", "cropr-per_block-r2-llf", "dtop-per_block-r2",
    ]  # fmt: skip
    configs = Path(CONFIG).parent / "segmentation_folder.py:vit_ti,runlocal"
    planned = plan.make(str(configs), (), dict.fromkeys(rows, (0,)), tmp_path)
    models = [runs[0].recipe.model for runs in planned.runs.values()]
    assert [(model.reduction, model.fusion) for model in models][1:] == [
        ("cropr", "llf"), ("dtop", "dtop"),
    ]  # fmt: skip
    made = [
        dataclasses.asdict(row) | table.summary([0.5, 0.6]) | {"metric_label": "mIoU"}
        for row in rows
    ]
    text = table.markdown(made)
    assert "| mIoU % |" in text and "| cropr | per-block | llf | 2 |" in text
    seeds.plot(made, tmp_path / "seeds.png", "mIoU")
    assert (tmp_path / "seeds.png").stat().st_size > 1000


def test_options_of_a_method_are_rows(tmp_path):
    rows = plan.entries(("cropr", "cropr:heads=2:mlp=False"), ("per_block",), (-1,))
    planned = plan.make(CONFIG, SMALL, dict.fromkeys(rows, (0,)), tmp_path)
    plain, other = (run.recipe.model for (run,) in planned.runs.values())
    options = dict(plain.reducer_options)
    assert dict(other.reducer_options) == {**options, "heads": 2, "mlp": False}
    assert other.clone(reducer_options=plain.reducer_options) == plain
    workdirs = [run.workdir.relative_to(tmp_path) for (run,) in planned.runs.values()]
    assert workdirs[1] == Path("cropr-heads=2-mlp=False-per_block", "seed_0")
    assert len({row.label for row in rows}) == 2
    row = dataclasses.asdict(rows[1]) | table.summary([0.5])
    assert "| cropr:heads=2:mlp=False | per-block |" in table.markdown([row])
    with pytest.raises(ConfigError, match="config.model.reduction.options.hats: no such field"):
        compare.main(arguments(tmp_path, "--reductions=cropr:hats=2"))
    with pytest.raises(ConfigError, match="'cropr:mlp', expected METHOD:OPTION=VALUE"):
        compare.main(arguments(tmp_path, "--reductions=cropr:mlp"))
    assert not (tmp_path / "runs").exists()


def test_result_of_the_same_run(tmp_path):
    def run(*more):
        planned = plan.make(CONFIG, (*SMALL, *more), {plan.Entry("random"): (0,)}, tmp_path)
        return next(iter(planned.runs.values()))[0]

    assert run().result() is None
    before = run().recipe.config
    del before["cpu_devices"]  # as in results from before there was that field
    run().workdir.mkdir(parents=True)
    (run().workdir / "result.json").write_text(json.dumps({"config": before}))
    assert run("--config.eval_batch_size=16", "--config.cpu_devices=1").result() is not None
    with pytest.raises(ConfigError, match="was run with config.seed 0, now it is 1;"):
        run("--config.seed=1").result()
    with pytest.raises(ConfigError, match="was run with config.data.eval.test 'test', now it is"):
        run("--config.data.eval.test=train").result()


def test_without_timing_there_is_no_trade_off(tmp_path):
    names = ("tpr", "tokens", "params", "params_slim", "macs_linear", "macs_all")
    results = [
        {
            "metrics": {"test": {"top1": top1, "examples": 9}},
            "config": {"model": {"reduction": {"rate": 2}}},
            **dict.fromkeys(names, 1.0),
            "tokens": [4, 2],
        }
        for top1 in (0.5, 0.6)
    ]
    row = compare.make_row(plan.Entry("random", "per_block"), (0, 1), results, TOP1, None)
    compare.write(tmp_path / "t", [row], {"device": "cpu", "revision": "", "versions": {}})
    assert "| random | per-block |" in (tmp_path / "t.md").read_text()
    assert (tmp_path / "t_seeds.png").exists() and not (tmp_path / "t.png").exists()
    speed = {"images_per_second": 3.0, "ratio": 1.0, "batch_size": 2}
    row = compare.make_row(plan.Entry("random", "per_block"), (0, 1), results, TOP1, speed)
    compare.write(tmp_path / "t", [row], {"device": "cpu", "revision": "", "versions": {}})
    assert (tmp_path / "t.png").exists()


def test_every_method_has_a_colour_of_its_own(tmp_path, monkeypatch):
    drawn = []

    class Kept(tradeoff.Figure):
        def savefig(self, *args, **kwargs):
            drawn.extend(bars.lines[0].get_color() for bars in self.axes[0].containers)
            super().savefig(*args, **kwargs)

    monkeypatch.setattr(tradeoff, "Figure", Kept)
    speed = {"images_per_second": 3.0}
    rows = [
        dataclasses.asdict(plan.Entry(name, "per_block")) | table.summary([0.5]) | speed
        for name in REDUCERS
    ]
    tradeoff.plot(rows, tmp_path / "t.png", "accuracy")
    assert len(rows) > 10 and len(set(drawn)) == len(rows)


def test_summary():
    assert table.summary([0.5])["low"] is None
    found = table.summary([0.1, 0.2, 0.6])
    # Student's t with two degrees of freedom: 4.303; standard deviation 0.2646.
    assert found["median"] == 0.2 and found["mean"] == pytest.approx(0.3)
    assert found["high"] - found["mean"] == pytest.approx(4.3027 * 0.264575 / 3**0.5, rel=1e-4)
