"""Schedules: the paper's counts, what is impossible, equal parameters for every rate."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cropr_jax import models
from cropr_jax.core.schedule import Schedule, aggressive, per_block, three_stage, to_counts
from cropr_jax.errors import ConfigError


def test_counts_of_the_paper():
    with_llf = per_block(24, 8, prefix=1, fusion=True)
    assert with_llf.tokens(196, 1) == tuple(range(188, 19, -8))
    without = per_block(24, 8, prefix=1, fusion=False)
    assert without.tokens(196, 1) == tuple(range(188, 11, -8))
    assert three_stage(24, 50, prefix=1, fusion=True).tokens(196, 1) == (146, 96, 46)
    assert three_stage(24, 50, prefix=1, fusion=True).blocks == (6, 12, 18)
    assert per_block(24, 40, prefix=1, fusion=True).tokens(1024, 1)[-1] == 144
    assert aggressive(24, 825).tokens(1024, 1) == (200,)
    stages = [(96 - 16 * i) ** 2 for i in range(1, 6)]
    detection = to_counts(24, 9216, (5, 8, 11, 14, 20), stages)
    assert detection.patches(9216) == tuple(stages)
    assert round(detection.tpr(9216), 2) == 0.97
    assert round(with_llf.tpr(196), 2) == 0.90 and round(without.tpr(196), 2) == 0.94


def test_block_inputs():
    schedule = per_block(4, 2, prefix=1, fusion=True)
    assert schedule.block_inputs(16, 1, fusion=True) == (17, 14, 12, 17)
    assert schedule.block_inputs(16, 1, fusion=False) == (17, 14, 12, 12)
    assert Schedule(3).block_inputs(16, 1, fusion=False) == (17, 17, 17)


@given(
    depth=st.integers(3, 32),
    rate=st.integers(0, 20),
    prefix=st.sampled_from([0, 1, 5]),
    m=st.integers(1, 300),
    fusion=st.booleans(),
)
def test_per_block_removes_what_it_says(depth, rate, prefix, m, fusion):
    schedule = per_block(depth, rate, prefix=prefix, fusion=fusion)
    assert len(schedule.sites) == depth - (2 if fusion else 1)
    assert schedule.removed == rate * len(schedule.sites) + (prefix if rate else 0)
    if schedule.removed < m:
        assert schedule.tokens(m, prefix)[-1] == prefix + m - schedule.removed
    else:
        with pytest.raises(ValueError, match=r"after block \d+"):
            schedule.patches(m)


def test_impossible_schedules_name_the_block():
    with pytest.raises(ValueError, match="block 2 after block 2"):
        Schedule(4, ((2, 1), (2, 1)))
    with pytest.raises(ValueError, match="block 5 after block 0"):
        Schedule(4, ((5, 1),))
    with pytest.raises(ValueError, match="remove -1 tokens after block 1"):
        Schedule(4, ((1, -1),))
    with pytest.raises(ValueError, match="remove -4 tokens after block 2"):
        to_counts(4, 16, (1, 2), (4, 8))
    with pytest.raises(ValueError, match="divisible by 4, found 6"):
        three_stage(6, 4, prefix=1, fusion=False)
    with pytest.raises(ValueError, match="nothing can be pruned after block 3"):
        three_stage(4, 4, prefix=1, fusion=True)
    with pytest.raises(ConfigError, match="rate 9.*after block 22 9 of 6 patch tokens"):
        models.create({"variant": "l", "image_size": 224, "num_classes": 10, "reduction": cropr(9)})


def cropr(rate):
    return {"name": "cropr", "rate": rate, "fusion": "llf"}


def test_every_rate_has_the_same_parameters():
    def shapes(rate):
        model = models.create(
            {
                "width": 16,
                "depth": 4,
                "heads": 2,
                "patch": 4,
                "image_size": 16,
                "num_classes": 3,
                "reduction": cropr(rate),
            }
        )
        return jax.tree.map(lambda leaf: leaf.shape, models.abstract_params(model))

    assert shapes(0) == shapes(1) == shapes(6)
