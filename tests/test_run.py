"""The command line of run.py: mistakes end in one line, before anything slow."""

import sys
from pathlib import Path

import pytest

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
