"""Paired intervals, and the table of results."""

import numpy as np
import pytest

from cropr_jax.bench import paired


def test_interval_of_equal_differences_is_a_point():
    assert paired.interval(np.zeros(10)) == (0, 0)
    assert paired.interval(np.full(10, -1.0)) == (-1, -1)


def test_interval_of_two_images():
    # Means 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4: both ends are within 95 %.
    assert paired.interval(np.array([0.0, 1.0])) == (0, 1)


def test_interval_of_losses_has_binomial_quantiles():
    # 10 losses in 100: the number in a resample is Binomial(100, 0.1), whose 2.5 % and 97.5 %
    # quantiles are 5 and 16.
    differences = np.where(np.arange(100) < 10, -1.0, 0.0)
    assert paired.interval(differences) == pytest.approx((-0.16, -0.05))


def test_interval_agrees_with_resampled_indices():
    rng = np.random.default_rng(1)
    differences = rng.choice([-1, -1 / 3, 0, 1 / 3, 1], size=400, p=[0.1, 0.1, 0.6, 0.1, 0.1])
    means = differences[rng.integers(0, 400, (4000, 400))].mean(1)
    expected = np.quantile(means, (0.025, 0.975))
    np.testing.assert_allclose(paired.interval(differences), expected, atol=0.005)
    # Pairing with itself: what only one image in ten changes is known to a few per cent.
    assert paired.interval(differences) == paired.interval(differences[::-1])


def test_hits_average_over_seeds():
    row = {"ranks": ["0149", "1049"]}
    np.testing.assert_array_equal(paired.hits(row, 1), [0.5, 0.5, 0, 0])
    np.testing.assert_array_equal(paired.hits(row, 5), [1, 1, 1, 0])


def test_percent_has_no_negative_zero():
    assert paired.percent(-1e-9, "+") == "+0.0"
    assert paired.percent(-0.0123, "+") == "-1.2"


def test_markdown_replaces_its_own_part(tmp_path):
    path = tmp_path / "docs" / "a.md"
    paired.write_markdown(path, "one")
    path.write_text(f"before\n{path.read_text()}after\n")
    paired.write_markdown(path, r"two \1")
    begin, end = paired.MARKS
    assert path.read_text() == f"before\n{begin}\ntwo \\1\n{end}\nafter\n"


def test_table_with_a_schedule_that_cannot_be_met():
    row = {"reduction": "none", "schedule": "per_block", "rate": 0, "fusion": "none", "removed": 0}
    row |= {"macs_all": 2 * 10**9, "ranks": ["0"], "top1": 1.0, "top5": 1.0}
    for top in ("top1", "top5"):
        row |= {f"{top}_seeds": [1.0], f"{top}_difference": 0.0, f"{top}_interval": [0.0, 0.0]}
    capped = {"reduction": "tome", "schedule": "three_stage", "rate": 50, "fusion": "none"}
    other = row | {"reduction": "random", "schedule": "three_stage", "rate": 50, "removed": 150}
    text = paired.table(
        {
            "rows": [row, capped | {"unreachable": "at block 9 at most 48"}, other],
            "weights": {"name": "w.npz", "sha256": "0" * 64},
            "data": [{"name": "photos", "images": 1, "crop_ratio": 0.9}],
            "device": "cpu",
            "versions": {},
        }
    )
    lines = text.splitlines()
    assert "| tome | none | unreachable | | | | | |" in lines
    assert any(line.startswith("| random | none | 150 | 2.00 | 100.0 |") for line in lines)
    assert lines[-1] == "tome: at block 9 at most 48."
