"""Warm-up and cosine against the released code's numbers and against NumPy."""

import math
import re

import numpy as np
import pytest
from conftest import fixture_names, load_fixture

from cropr_jax.errors import ConfigError
from cropr_jax.train.learning_rate import WarmupCosine, WarmupPoly, effective_learning_rate


def reference(peak, floor, warmup, total):
    """Both pieces as arrays, float64."""
    warm = np.linspace(0, peak, warmup)
    if warmup > 1:
        warm[0] = warm[1]
    steps = np.arange(total - warmup)
    decay = floor + 0.5 * (peak - floor) * (1 + np.cos(np.pi * steps / max(len(steps), 1)))
    return np.concatenate([warm, decay])


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("schedules_cls"))
def test_released_schedules(name):
    for case in load_fixture(name)[1].values():
        args = case["args"]
        schedule = WarmupCosine.from_epochs(
            args["base_value"],
            args["final_value"],
            args["niter_per_ep"],
            args["epochs"],
            args["warmup_epochs"],
        )
        at = case.get("at") or dict(enumerate(case["values"]))
        assert schedule.total_steps == case.get("length", len(at))
        got = np.asarray(schedule(np.array([int(step) for step in at])))
        np.testing.assert_allclose(
            got, list(at.values()), rtol=1e-6, atol=2e-7 * args["base_value"]
        )


@pytest.mark.parametrize(("warmup", "total"), [(0, 5), (2, 2), (3, 17), (40, 400)])
def test_matches_numpy(warmup, total):
    got = WarmupCosine(2e-3, 1e-6, warmup, total)(np.arange(total))
    np.testing.assert_allclose(got, reference(2e-3, 1e-6, warmup, total), rtol=2e-5)


def test_single_warmup_step_is_not_wasted():
    assert float(WarmupCosine(1.0, 0.0, 1, 4)(0)) == 1.0


def test_ends_at_the_floor_and_stays():
    schedule = WarmupCosine(1.0, 1e-6, 2, 10)
    assert math.isclose(float(schedule(10)), 1e-6, rel_tol=1e-3)
    assert float(schedule(99)) == float(schedule(10))


def test_impossible_warmup():
    with pytest.raises(ConfigError, match="warm-up takes 11 of 10"):
        WarmupCosine(1.0, 0.0, 11, 10)
    with pytest.raises(ConfigError, match="at least one step"):
        WarmupCosine(1.0, 0.0, 0, 0)


def test_effective_rate_of_the_paper():
    assert effective_learning_rate(1e-3, 1024) == 4e-3


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("optim_segm"))
def test_released_polynomial(name):
    meta = load_fixture(name)[1]
    case = meta["poly"]
    power = float(re.search(r"\*\*([\d.]+)", case["formula"])[1])
    used = meta["learning_rates_in_use_by_step"]
    # Every group of parameters has the same rate, so layer-wise decay is off.
    assert all(len(set(rates)) == 1 for rates in used.values())
    expected = case["at"] | {step: rates[0] for step, rates in used.items()}
    peak = expected["0"]
    schedule = WarmupPoly(peak, 0.0, 0, case["iter_max"], power)
    got = schedule(np.array([int(step) for step in expected]))
    np.testing.assert_allclose(got, list(expected.values()), rtol=1e-6, atol=2e-7 * peak)


def test_polynomial_by_hand():
    schedule = WarmupPoly(1.0, 0.1, 3, 10, 0.5)
    curve = [0.1 + 0.9 * (1 - step / 10) ** 0.5 for step in range(11)]
    # The warm-up goes from 0 to the curve, the first step taking the rate of the second.
    top = 0.9 * 0.7**0.5
    curve[:3] = [0.1 + top / 3, 0.1 + top / 3, 0.1 + top * 2 / 3]
    np.testing.assert_allclose(schedule(np.arange(11)), curve, rtol=1e-6)
    assert float(schedule(99)) == pytest.approx(0.1)


def test_line_is_a_power():
    np.testing.assert_allclose(
        WarmupPoly(2.0, 0.0, 0, 4, 1.0)(np.arange(5)), [2, 1.5, 1, 0.5, 0], rtol=1e-6
    )
