"""K-Medoids: the reference's numbers with its update, and the algorithm's with the paper's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokred
from conftest import fixture_names, load_fixture

from cropr_jax import models
from cropr_jax.convert.timm import params_from_state_dict
from cropr_jax.errors import ConfigError
from cropr_jax.reducers import Context
from cropr_jax.reducers.kmedoids import KMedoids, fit
from cropr_jax.tokens import from_features

fit = jax.jit(fit, static_argnums=(2, 3, 4))


def draw(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3, 12, 4))
    distance = np.sqrt(((x[:, :, None] - x[:, None]) ** 2).sum(-1)).astype(np.float32)
    return x, distance, rng.uniform(0.5, 1.5, size=(3, 12)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=2)
def reduce(x, weights, keep):
    """Of 12 patches and CLS."""
    tokens = from_features(x, (3, 4), 1)
    return KMedoids().apply({}, tokens, Context(col_mean_all=weights), keep=keep, train=False)


def objective(distance, weights, medoids):
    nearest = np.take_along_axis(distance, np.asarray(medoids)[:, None], 2).min(2)
    return (weights * nearest).sum(1)


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("tokred_kmedoids"))
def test_token_reduction(name):
    arrays, meta = load_fixture(name)
    options = meta["config"]["args"]
    model = tokred.build(meta, "kmedoids", meta["config"]["cluster_count"])
    model = model.clone(
        reducer_options=(("iterations", options["cluster_iters"]), ("variant", "tokenreduction"))
    )
    params = params_from_state_dict(tokred.strip(arrays, "w/"), model)
    _, out = tokred.run(model, params, arrays)
    before = np.tile(np.arange(arrays["out/reduce.0/x"].shape[1]), (meta["config"]["batch"], 1))
    for site, block in enumerate(options["reduction_loc"]):
        chosen = arrays[f"out/viz.{block}/Kept_Tokens"]
        before = np.take_along_axis(before, chosen, 1)
        np.testing.assert_array_equal(out["kept"][site], before)
        cluster = arrays[f"out/viz.{block}/Assignment_Maps"]
        np.testing.assert_array_equal(out["sites"][site]["cluster"], cluster)


def test_the_toy_of_two_groups():
    """KM-5: the middle of each. The other update sits at the edges, whatever the weights."""
    line = np.array([0.0, 1, 2, 100, 101, 102], np.float32)
    distance, weights = np.abs(line[:, None] - line)[None], np.ones((1, 6), np.float32)
    assert set(np.asarray(fit(distance, weights, 2, 3, "paper"))[0]) == {1, 4}
    weights[:, [1, 4]] = 2
    assert set(np.asarray(fit(distance, weights, 2, 3, "paper"))[0]) == {1, 4}
    assert set(np.asarray(fit(distance, weights, 2, 3, "tokenreduction"))[0]) == {2, 3}


def test_a_heavy_token_is_a_medoid_and_scale_does_not_matter():
    """KM-6."""
    _, distance, weights = draw()
    plain = fit(distance, weights, 4, 3, "paper")
    np.testing.assert_array_equal(fit(distance, 2 * weights, 4, 3, "paper"), plain)
    weights[:, 5] = 100
    assert (np.asarray(fit(distance, weights, 4, 3, "paper")) == 5).any(1).all()


def test_the_objective_falls():
    """KM-2, KM-3: no update raises it, and some lower it; medoids differ."""
    _, distance, weights = draw()
    medoids = [fit(distance, weights, 4, steps, "paper") for steps in range(4)]
    values = np.stack([objective(distance, weights, found) for found in medoids])
    assert (np.diff(values, axis=0) <= 1e-6).all() and (values[-1] < values[0] - 0.1).any()
    assert all(len(set(row)) == 4 for row in np.asarray(medoids[-1]))


def test_medoids_are_tokens_and_the_others_are_pruned():
    """KM-1, KM-4: rows of the input, bit by bit, CLS in front."""
    x = np.random.default_rng(0).normal(size=(3, 13, 4)).astype(np.float32)
    weights = np.random.default_rng(1).uniform(size=(3, 13)).astype(np.float32)
    kept, gone, out = reduce(x, weights, 4)
    index = np.asarray(kept.index)
    np.testing.assert_array_equal(kept.x[:, 0], x[:, 0])
    np.testing.assert_array_equal(kept.x[:, 1:], np.take_along_axis(x[:, 1:], index[..., None], 1))
    own = np.take_along_axis(np.asarray(out["cluster"]), index, 1)
    np.testing.assert_array_equal(own, np.tile(np.arange(4), (3, 1)))
    assert (np.diff(np.asarray(gone.index), axis=1) > 0).all()
    everything, nothing, _ = reduce(x, weights, 12)
    np.testing.assert_array_equal(np.sort(everything.index, 1), np.tile(np.arange(12), (3, 1)))
    assert nothing.patches == 0


def test_equal_tokens_keep_clusters_apart():
    """KM-3 where all distances are 0: as many different medoids."""
    zeros = jnp.zeros((1, 12, 12))
    found = np.asarray(fit(zeros, jnp.ones((1, 12)), 5, 3, "paper"))
    assert len(set(found[0])) == 5


def test_unknown_variant():
    with pytest.raises(ConfigError, match="kmedoids variant: found 'fast', expected one of"):
        models.create(
            {
                "variant": "ti",
                "image_size": 64,
                "num_classes": 2,
                "reduction": {"name": "kmedoids", "rate": 1, "options": {"variant": "fast"}},
            }
        )
