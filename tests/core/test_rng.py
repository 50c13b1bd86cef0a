"""Random keys: of seed, step and example alone, however examples are cut into batches."""

import jax
import numpy as np
from scipy import stats

from cropr_jax.core import rng

SEED = jax.random.key(3)
example_keys = jax.jit(rng.example_keys)
uniform = jax.jit(rng.uniform, static_argnums=1)
gumbel = jax.jit(rng.gumbel, static_argnums=1)
fold = jax.jit(rng.fold, static_argnums=1)


def draws(key, step, ids, purpose=0):
    """A number of each example."""
    keys = fold(example_keys(key, step, np.array(ids)), purpose)
    return np.asarray(uniform(keys, ()))


def test_an_example_draws_the_same_in_every_batch():
    whole = draws(SEED, 5, [2, 7, 40, 9])
    np.testing.assert_array_equal(draws(SEED, 5, [9, 40, 7, 2]), whole[::-1])
    np.testing.assert_array_equal(draws(SEED, 5, [40]), whole[2:3])
    np.testing.assert_array_equal(draws(SEED, np.int32(5), [2, 7]), whole[:2])


def test_seed_step_example_and_purpose_each_change_the_draw():
    found = [
        draws(jax.random.key(seed), step, range(10), purpose)
        for seed in range(3)
        for step in range(4)
        for purpose in range(3)
    ]
    # Step 1 of example 2 must not be step 2 of example 1, nor any other pair the same.
    assert len(np.unique(np.concatenate(found))) == 3 * 4 * 3 * 10


def test_a_key_is_folded_from_step_and_id():
    """Checkpoints resume with the same numbers only while this stays as it is."""
    step, ids = 6, np.array([0, 11])
    expected = [jax.random.fold_in(jax.random.fold_in(SEED, step), i) for i in ids]
    found = example_keys(SEED, step, ids)
    for key, one in zip(found, expected, strict=True):
        np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(one))
    np.testing.assert_array_equal(
        jax.random.key_data(fold(found, 4)[1]),
        jax.random.key_data(jax.random.fold_in(expected[1], 4)),
    )


def test_numbers_of_a_key_are_its_own():
    keys = example_keys(SEED, 0, np.arange(3))
    for draw, one in ((uniform, jax.random.uniform), (gumbel, jax.random.gumbel)):
        found = draw(keys, (2, 5))
        assert found.shape == (3, 2, 5)
        np.testing.assert_array_equal(found[1], one(keys[1], (2, 5)))


def test_distributions():
    keys = example_keys(SEED, 0, np.arange(4000))
    numbers = np.asarray(uniform(keys, (2,)))
    assert numbers.min() >= 0 and numbers.max() < 1
    assert stats.kstest(numbers[:, 1], "uniform").pvalue > 0.01
    noise = np.asarray(gumbel(keys, (2,)))
    assert stats.kstest(noise[:, 1], "gumbel_r").pvalue > 0.01
    # Numbers of neighbouring examples have nothing to do with each other.
    assert abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.05
