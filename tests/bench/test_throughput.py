"""The benchmark: its file, its resumption, its command line."""

import json
import sys

import jax
import numpy as np
import pytest
from training import mesh_of

from cropr_jax import models
from cropr_jax.bench import __main__ as command
from cropr_jax.bench import methods, programs, report, spec, throughput
from cropr_jax.errors import ConfigError
from cropr_jax.models import costs
from cropr_jax.models.fields import ARCHITECTURES
from cropr_jax.reducers.registry import REDUCERS
from cropr_jax.train import assemble, sharding

TINY = "vit,width=16,depth=3,heads=2,patch=4,res=16,classes=5,r=4"
SCHEMA = {
    "config": str,
    "reduction": str,
    "precision": str,
    "attention": str,
    "stage": str,
    "rounds": int,
    "images_per_second": float,
    "spread": float,
    "ratio": float,
    "ratio_spread": float,
    "batch_size": int,
    "latency_seconds": float,
    "fusion": str,
    "macs_linear": int,
    "macs_all": int,
    "params_full": int,
    "params_slim": int,
    "tokens": list,
    "tpr": float,
    "trace_seconds": float,
    "compile_seconds": float,
    "peak_bytes": int,
    "flops": float,
    "seconds": list,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(throughput, "ROUND_SECONDS", 1e-3)
    monkeypatch.setattr(throughput, "LATENCY_SECONDS", 1e-3)


@pytest.fixture
def one_device(monkeypatch):
    """Steps on one of the devices; else a batch has an image for each of them."""
    monkeypatch.setattr(sharding, "make_mesh", lambda **_: mesh_of(1, 1))
    monkeypatch.setattr(assemble, "device_count", lambda: 1)


def test_file_and_resumption(tmp_path, capsys, monkeypatch):
    path = tmp_path / "speed.json"
    arguments = ["--config", TINY, "--batch_size", "2", "--rounds", "3", "--json", str(path)]
    command.main(arguments)
    content = json.loads(path.read_text())
    assert content["device"] == jax.devices()[0].device_kind
    assert content["versions"]["jax"] == jax.__version__
    rows = {row["reduction"]: row for row in content["rows"]}
    assert list(rows) == ["none", "random", "cropr"]
    for row in rows.values():
        assert {name: type(value) for name, value in row.items()} == SCHEMA
        assert row["rounds"] == len(row["seconds"]) == 3
        assert row["compile_seconds"] > row["trace_seconds"] > 0
        assert row["peak_bytes"] > 4 * row["params_slim"]
        low, high = min(row["seconds"]), max(row["seconds"])
        assert 2 / high <= row["images_per_second"] <= 2 / low
    assert rows["none"]["ratio"] == 1 and rows["none"]["tokens"] == []
    ours = rows["cropr"]
    assert ours["tokens"] == [12] and ours["tpr"] == 5 / 16
    model = models.create(spec.with_reduction(spec.model_fields(TINY), "cropr"))
    assert ours["macs_all"] == costs.count(model).all
    assert ours["params_full"] == models.count(models.abstract_params(model))
    assert ours["params_slim"] < ours["params_full"]
    paired = np.divide(rows["none"]["seconds"], ours["seconds"])
    assert ours["ratio"] == pytest.approx(np.median(paired))
    table = capsys.readouterr().out
    assert "images/s" in table and "random" in table

    # Measured rows are not measured again; a group with a row that fell short is.
    def fail(*_):
        raise AssertionError("measured again")

    with monkeypatch.context() as patched:
        patched.setattr(throughput, "measure", fail)
        command.main(arguments)
        assert json.loads(path.read_text()) == content
        content["rows"][1]["rounds"] = 2
        path.write_text(json.dumps(content))
        with pytest.raises(AssertionError, match="measured again"):
            command.main(arguments)

    path.write_text(json.dumps(content | {"device": "another"}))
    with pytest.raises(ConfigError, match="was measured with device 'another'"):
        command.main(arguments)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no benchmark file"):
        command.main(arguments)


def test_an_interrupted_benchmark_leaves_rows(tmp_path):
    file = report.Report(tmp_path / "speed.json")
    seen = []

    def save(rows):
        file.add(rows)
        seen.append([row["rounds"] for row in json.loads(file.path.read_text())["rows"]])
        if len(seen) == 2:
            raise KeyboardInterrupt

    settings = methods.Settings(("none", "cropr"), batch_size=1)
    with pytest.raises(KeyboardInterrupt):
        throughput.measure(TINY, settings, save=save)
    assert seen == [[1, 1], [2, 2]]


@pytest.mark.slow
def test_training_steps(one_device):
    """With what three of them change in the memory of one; several of a method by its options."""
    names = ("none", "cropr", "cropr:mlp=false")
    settings = methods.Settings(names, batch_size=2, rounds=2, stages=("train",))
    none, cropr, small = throughput.measure(TINY, settings)
    assert none["latency_seconds"] is None
    assert cropr["params_full"] > small["params_full"] > none["params_full"]
    assert cropr["flops"] > small["flops"]
    # Parameters and two moments are arguments; the outputs take their place.
    assert cropr["peak_bytes"] > 3 * 4 * cropr["params_full"]


def test_training_steps_count_what_all_devices_do(one_device, monkeypatch):
    """Losses and gradients of the batch; what each does for itself (AdamW) is little beside."""
    config = f"{TINY},depth=2,res=64"
    model = methods.create(config, "cropr", methods.Settings())

    def flops():
        training = programs.Training(model, programs.Pool(), spec.training_fields(config))
        return training.compile(8).flops

    alone = flops()
    monkeypatch.setattr(sharding, "make_mesh", lambda **_: mesh_of(8, 1))
    assert flops() == pytest.approx(alone, rel=0.1)


def test_training_steps_that_do_not_divide(capsys):
    assert jax.device_count() == 8
    settings = methods.Settings(("none",), batch_size=12, stages=("slim", "train"))
    with pytest.raises(ConfigError, match="batch_size: 12 does not divide by 8 devices.* is 8"):
        throughput.measure(TINY, settings, say=print)
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_stages_take_turns(one_device):
    """Each method is timed once in what is the same program, and compared with 'none' of a kind."""
    settings = methods.Settings(("none", "cropr"), 1, rounds=2, stages=programs.STAGES)
    rows = {(row["reduction"], row["stage"]): row for row in throughput.measure(TINY, settings)}
    assert list(rows)[:2] == [("none", "slim"), ("none", "train")]
    assert list(rows)[2:] == [("cropr", stage) for stage in programs.STAGES]
    for (_, stage), row in rows.items():
        base = rows["none", "train" if stage == "train" else "slim"]
        paired = np.divide(base["seconds"], row["seconds"])
        assert row["ratio"] == pytest.approx(np.median(paired))
        alone = None if stage == "train" else np.median(row["seconds"])
        assert row["latency_seconds"] == alone
    costs = [rows["cropr", stage]["flops"] for stage in programs.STAGES]
    assert costs == sorted(costs)
    assert rows["cropr", "train"]["macs_all"] == rows["cropr", "slim"]["macs_all"]
    random = {"random": methods.create(TINY, "random", settings)}
    assert methods.entrants(random, ["train_form", "all_queries"]) == [("random", "slim")]


def test_forms_of_a_segmenter():
    """The same logits; all queries cost their product with all tokens, 64 of them and CLS."""
    config = f"{TINY},head=segmentation,width=64,res=32"
    model = methods.create(config, "cropr", methods.Settings())
    weights, batch = programs.Weights(), programs.example_inputs(model, 2)

    def run(stage):
        maker = programs.Inference(model, weights, stage)
        compiled = jax.jit(maker.predict).lower(maker.params, *batch).compile()
        return compiled(maker.params, *batch), compiled.cost_analysis()["flops"]

    logits, slim = run("slim")
    found, all_queries = run("all_queries")
    (trained, sites), _ = run("train_form")
    assert logits.std() > 0.01 and logits.shape == (2, 8, 8, 5)
    np.testing.assert_allclose(found, logits, atol=1e-5)
    np.testing.assert_allclose(trained, logits, atol=1e-5)
    assert [site["auxiliary"].shape for site in sites] == [(2, 64, 5)]
    assert all_queries - slim == pytest.approx(2 * 2 * 64 * 65 * 64, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fusion", "names"),
    [("dtop", ("none", "dtop")), ("token_concat", ("cropr:train_queries=4",))],
)
def test_training_steps_of_segmenters(one_device, fusion, names):
    """On their own task; a fusion may bring its method, and some of the queries may train."""
    settings = methods.Settings(names, batch_size=2, rounds=1, stages=("train",))
    rows = throughput.measure(f"{TINY},head=segmentation,fusion={fusion}", settings)
    assert [row["reduction"] for row in rows] == [*names]
    assert rows[-1]["fusion"] == fusion and rows[-1]["tokens"] == [12]


@pytest.mark.slow
def test_all_methods_in_one_run(tmp_path, capsys):
    """Every registered one, or why not; without Last Layer Fusion where the method refuses it."""
    path = tmp_path / "speed.json"
    small = "vit,width=8,depth=4,heads=2,patch=4,res=16,classes=3,schedule=aggressive,r=9"
    quick = ["--batch_size", "1", "--rounds", "1", "--json", str(path)]
    command.main(["--config", small, "--reduction", "all", *quick])
    content = json.loads(path.read_text())
    rows = {row["reduction"]: row for row in content["rows"]}
    assert set(rows) == {"none", *REDUCERS} - {"tome"}
    for name, row in rows.items():
        refuses = name == "none" or REDUCERS[name]().refuses_fusion
        assert row["fusion"] == ("none" if refuses else "llf")
        assert name == "none" or row["tokens"] == [8]
    assert "can remove at most 8 of 16" in content["refused"][small]["tome"]
    printed = capsys.readouterr().out
    assert "tome: not timed, " in printed and all(name in printed for name in REDUCERS)
    # A method that was named has to work.
    with pytest.raises(ConfigError, match="'tome' can remove at most 8 of 16"):
        command.main(["--config", small, "--reduction", "none,tome", *quick])


def test_best_batch_stops_when_nothing_is_gained():
    class Program:
        def __init__(self, size):
            if size > 64:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB")
            self.size = size

        def seconds(self, calls=1):
            return 1 + 0.1 * self.size if self.gains else 1.0 * self.size

    Program.gains = True
    assert throughput.best_batch(Program, print) == 64
    Program.gains = False
    assert throughput.best_batch(Program, print) == 1


def test_rounds_rotate():
    assert throughput.rotate("abc", 0) == ["a", "b", "c"]
    assert throughput.rotate("abc", 4) == ["b", "c", "a"]


def test_variants():
    fields = spec.parse_variant("vit_l,fusion=none,res=336,prefix=0,mlp_ratio=3.5,remat=true")
    assert fields == {
        "name": "vit",
        "variant": "l",
        "image_size": 336,
        "num_classes": 1000,
        "prefix": 0,
        "mlp_ratio": 3.5,
        "remat": True,
        "reduction": {"fusion": "none", "rate": 18},
    }
    # The paper's rates at 224, 336 and 448 pixels.
    for name, rate in (("vit_b", 16), ("vit_l", 8), ("vit_h", 8), ("vit_l,res=448", 32)):
        assert spec.parse_variant(name)["reduction"]["rate"] == rate
    # Those of configs/in1k.py; all variants can be built.
    for name, rate in (("eva02_ti,res=336", 45), ("eva02_b,res=448", 80), ("eva02_l,res=448", 40)):
        assert spec.parse_variant(name)["reduction"]["rate"] == rate
    for architecture, rates in spec.RATES.items():
        assert set(rates) == set(ARCHITECTURES[architecture].VARIANTS)
    model = models.create(spec.with_reduction(spec.parse_variant("eva02_s"), "random"))
    assert (model.mlp, model.grid, model.schedule.removed) == ("swiglu", (16, 16), 201)
    model = models.create(spec.parse_variant("eva02,width=8,depth=2,heads=2"))
    assert model.rope_reference == (16, 16)
    assert spec.parse_variant("vit_b,res=224x320")["image_size"] == (224, 320)
    options = spec.parse_variant("vit_b,reduction.options.heads=16")
    assert spec.with_reduction(options, "cropr")["reduction"]["options"] == {"heads": 16}
    assert "options" not in spec.with_reduction(options, "random")["reduction"]
    more = spec.with_reduction(options, "cropr:train_queries=4:remat=true:mlp=False")["reduction"]
    assert more["options"] == {"heads": 16, "train_queries": 4, "remat": True, "mlp": False}
    assert more["name"] == "cropr"
    assert spec.with_reduction(options, "dtop")["reduction"]["fusion"] == "dtop"


@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
def test_config_files_make_any_class_with_to_dict(tmp_path):
    (tmp_path / "made.py").write_text(
        "class Config(dict):\n"
        "    def to_dict(self):\n"
        "        return dict(self)\n"
        "def get_config(arg=None):\n"
        "    return Config(model={'variant': arg or 'ti'})\n"
    )
    assert spec.model_fields(f"{tmp_path / 'made.py'}:s") == {"variant": "s"}
    assert spec.model_fields(str(tmp_path / "made.py")) == {"variant": "ti"}


@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
def test_config_files_import_their_neighbours(tmp_path, monkeypatch):
    """From wherever the command was started."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "neighbours"
    folder.mkdir()
    (folder / "base.py").write_text("MODEL = {'variant': 'ti'}\n")
    (folder / "made.py").write_text(
        "from ml_collections import ConfigDict\n"
        "from neighbours import base\n"
        "def get_config(arg=None):\n"
        "    return ConfigDict({'model': base.MODEL})\n"
    )
    assert spec.model_fields(str(folder / "made.py")) == {"variant": "ti"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config is missing"),
        (["--config", "vit_x"], "found 'vit_x', expected a file"),
        (["--config", "vit_l,fast"], "found 'fast'.*expected key=value"),
        (["--config", "none.py:vit_l"], "--config: there is no file 'none.py'"),
        (["--config", TINY, "--reduction", "cropper"], "found 'cropper'"),
        (["--config", "eva02_h"], "found 'eva02_h', expected a file"),
        (["--config", TINY + ",schedule=aggressive,r=99", "--reduction", "all"], "rate 99"),
        (["--config", TINY, "--precision", "int8"], "config.precision: found 'int8'"),
        (["--config", TINY, "--stage", "slim,infer"], "stage: found 'infer', .*'train_form'"),
        (["--config", TINY, "--reduction", "cropr:fast"], "'cropr:fast', expected METHOD:OPTION"),
        (["--config", TINY, "--reduction", "cropr:fast=1"], "options.fast: no such field"),
        (["--config", TINY + ",fusion=dtop"], "'dtop' prunes by its own heads' confidence"),
        (["--config", TINY + ",colour=3"], "colour"),
        (["--config", TINY, "--rounds", "0"], "--rounds: found 0"),
        (["--config", TINY, "--input"], "has no data"),
    ],
)
def test_wrong_commands(arguments, message):
    with pytest.raises(ConfigError, match=message):
        command.main(arguments)


def test_floor(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command.floor, "CPU_SIZE", (64, 2**16))
    monkeypatch.setattr(command.floor, "SECONDS", 1e-4)
    path = tmp_path / "speed.json"
    arguments = [
        "--floor",
        "--config",
        TINY,
        "--batch_size",
        "1",
        "--rounds",
        "1",
        "--reduction",
        "none",
        "--json",
        str(path),
    ]
    command.main(arguments)
    content = json.loads(path.read_text())
    assert set(content["floor"]) == {
        "float32_macs_per_second",
        "bfloat16_macs_per_second",
        "bytes_per_second",
    }
    assert 0 < content["rows"][0]["floor_share"] < 10
    assert "matrix product" in capsys.readouterr().out
