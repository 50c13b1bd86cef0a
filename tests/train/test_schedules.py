"""Warm-up and cosine against the released code's numbers and against NumPy."""

import math

import numpy as np
import pytest
from conftest import fixture_names, load_fixture

from cropr_jax.errors import ConfigError
from cropr_jax.train.schedules import WarmupCosine, effective_learning_rate


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
