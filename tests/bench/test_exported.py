"""A predictor and its exports, timed side by side."""

import numpy as np
import pytest

from cropr_jax.bench import exported
from cropr_jax.errors import ConfigError

CONFIG = "vit,width=32,depth=2,heads=2,patch=8,res=16,classes=5,r=1,fusion=none"


@pytest.mark.slow
def test_times_all_three(capsys):
    exported.main(["--config", CONFIG, "--batch_size", "1,2", "--rounds", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert "Batch 2, 2 rounds" in lines
    rows = [
        line.split(" | ") for line in lines if line.startswith(("| predictor", "| jax", "| on"))
    ]
    assert [row[0] for row in rows] == ["| predictor", "| jax.export", "| onnxruntime"] * 2
    assert all(float(row[1]) > 0 and float(row[3]) > 0 for row in rows)
    assert rows[0][3] == "1.00"


def test_does_not_time_what_computes_something_else():
    calls = {"predictor": lambda x: np.zeros((1, 2)), "other": lambda x: np.ones((1, 2))}
    with pytest.raises(ConfigError, match="other: logits differ by 1.0e"):
        exported.measure(calls, np.zeros((1, 4, 4, 3), np.uint8), 1)


def test_table_compares_within_rounds():
    """The machine is ten times slower in the second round; the ratio does not see it."""
    text = exported.table({"predictor": np.array([10.0, 1.0]), "other": np.array([20.0, 2.0])})
    assert text.splitlines()[-1] == "| other | 11.0 | 9.0 | 2.00 | 0.00 |"
