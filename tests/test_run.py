"""The command line of run.py: mistakes end in one line, before anything slow."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment

import run

ROOT = Path(__file__).resolve().parents[1]
DIGITS = str(ROOT / "configs" / "digits.py")


# ml_collections loads the file in a way that Python is giving up.
@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
@pytest.mark.parametrize(("words", "message"), [
    (["--config", DIGITS, "--config.optimizer.larning_rate=3"],
     "config.optimizer.larning_rate: no such field"),
    (["--config", DIGITS, "--config.optimzer.lr=3"], "did you mean optimizer?"),
    (["--config", DIGITS, "--noconfig.seeed"], "did you mean seed?"),
    (["--config", DIGITS, "--config.seed.x=3"], "config.seed.x: no such field; there are none"),
    (["--config=nofile.py:x"], "--config: there is no file 'nofile.py'"),
    ([f"--config={DIGITS}:foo=1"], "--config argument 'foo' is unknown"),
    ([f"--config={DIGITS}:r=x"], "--config argument r: found 'x'"),
])  # fmt: skip
def test_mistakes(words, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    with pytest.raises(SystemExit) as caught:
        run.parse(["run.py", *words])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error


def test_default_workdir():
    assert run.default_workdir("configs/digits.py") == "runs/digits"
    assert run.default_workdir("configs/in1k.py:vit_l,res=336") == "runs/in1k-vit_l-res=336"


# run.py, asked to stop in its first step.
STOPPED = """
import os, runpy, signal, sys
from cropr_jax.train import loop

seen = loop.Preemption.at

def at(self, step):
    if step == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return seen(self, step)

loop.Preemption.at = at
sys.argv[0] = "run.py"
runpy.run_path("run.py", run_name="__main__")
"""


@pytest.mark.slow
def test_eva02_trains_resumes_and_evaluates(tmp_path):
    """The recipe of EVA-02-L but for what makes it large: data, images, batch, depth and width."""
    config = f"--config={ROOT / 'configs' / 'in1k.py'}:eva02_l,runlocal,res=56,r=2"
    workdir = tmp_path / "run"
    # The largest variant but one: its MLPs have the same norm.
    words = [config, "--config.model.variant=b"]
    words += [f"--workdir={workdir}", f"--cache_dir={tmp_path / 'cache'}"]

    def start(*command):
        done = subprocess.run(
            [sys.executable, *command, *words], cwd=ROOT, env=environment(), capture_output=True,
            text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        assert "SIGTERM: saved step 1 of 2" in start("-c", STOPPED)
        assert not (workdir / "result.json").exists()
        assert "Resumes after step 1" in start("run.py")
        result = json.loads((workdir / "result.json").read_text())
        assert result["best"]["step"] == 2 and result["metrics"]["test"]["examples"] == 24
        # 16 patches and CLS; three go after the first block, two after the second, all come back.
        assert result["config"]["model"]["name"] == "eva02" and result["tokens"] == [14, 12]
        start("run.py", "--mode=eval")
        again = json.loads((workdir / "eval.json").read_text())
        assert {"step": again["step"], **again["metrics"]["test"]} == result["best"]
    finally:
        shutil.rmtree(workdir, ignore_errors=True)  # gigabytes
