"""DPC-KNN: the reference's numbers, and what clustering by density peaks promises."""

import functools

import jax
import numpy as np
import pytest
import tokred
from conftest import fixture_names, load_fixture

from cropr_jax import models
from cropr_jax.errors import ConfigError
from cropr_jax.reducers import Context
from cropr_jax.reducers.clusters import squared_distances
from cropr_jax.reducers.dpc_knn import DPCKNN, density_peaks, mean_of_smallest
from cropr_jax.tokens import from_features

KEEP = 5


def draw(seed=0):
    return np.random.default_rng(seed).normal(size=(2, 13, 6)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(2, 3))
def compiled(x, params, keep, equal_weight):
    module = DPCKNN(equal_weight=equal_weight)
    tokens = from_features(x, (3, 4), 1)
    return module.apply({"params": params}, tokens, Context(), keep=keep, train=False)


def reduce(x, params, keep=KEEP, equal_weight=False):
    """Of 12 patches and CLS, on the host."""
    return jax.device_get(compiled(x, params, keep, equal_weight))


def params(scale=1.0):
    kernel = scale * np.random.default_rng(7).normal(size=(6, 1)).astype(np.float32)
    return {"score": {"kernel": kernel, "bias": np.array([0.3], np.float32)}}


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("tokred_dpcknn"))
def test_token_reduction(name):
    arrays, meta = load_fixture(name)
    options = meta["config"]["args"]
    model = tokred.build(meta, "dpc_knn", meta["config"]["cluster_count"])
    equal = options["equal_weight"]
    model = model.clone(
        reducer_options=(("equal_weight", equal), ("neighbours", options["k_neighbors"]))
    )
    tree = tokred.params(
        arrays,
        meta,
        "cluster_layers",
        lambda weights: {} if equal else {"score": tokred.linear(weights, "score")},
    )
    _, out = tokred.run(model, {k: v for k, v in tree.items() if jax.tree.leaves(v)}, arrays)
    for site, block in enumerate(options["reduction_loc"]):
        found = out["sites"][site]
        np.testing.assert_array_equal(found["centres"], arrays[f"out/viz.{block}/Kept_Tokens"])
        np.testing.assert_array_equal(found["cluster"], arrays[f"out/viz.{block}/Assignment_Maps"])


def test_distances_and_densities_by_hand():
    x = draw()[:, 1:]
    expected = ((x[:, :, None] - x[:, None]) ** 2).sum(-1)
    found = jax.jit(squared_distances)(x + 100)
    np.testing.assert_allclose(found, expected, atol=1e-3)
    np.testing.assert_array_equal(np.diagonal(found, axis1=1, axis2=2), 0)
    smallest_of = jax.jit(mean_of_smallest, static_argnums=1)
    np.testing.assert_allclose(
        smallest_of(expected, 4), np.sort(expected, -1)[..., :4].mean(-1), rtol=1e-5
    )
    ties = np.ones((1, 2, 6), np.float32)
    ties[:, 0] = 0
    np.testing.assert_array_equal(smallest_of(ties, 3), [[0, 1]])


def test_centres_by_a_loop():
    """The rule as it is written, in float64 and without logarithms."""
    x = draw()[:, 1:].astype(np.float64)
    distance = ((x[:, :, None] - x[:, None]) ** 2).sum(-1) / 6
    found = jax.jit(density_peaks, static_argnums=(1, 2))(distance.astype(np.float32), 5, 4)
    for one, centres in zip(distance, np.asarray(found), strict=True):
        density = np.exp(-np.sort(one, 1)[:, :4].mean(1))
        far = [
            np.sqrt(one[i][density > density[i]].min() if density[i] < density.max() else one.max())
            for i in range(12)
        ]
        np.testing.assert_array_equal(centres, np.argsort(-density * far)[:5])
        assert density.argmax() in centres  # DPC-5


def test_all_tokens_as_centres_are_a_permutation():
    """DPC-1; indices stay."""
    x = draw()
    out, gone, _ = reduce(x, params(), 12)
    assert gone is None
    order = out.index
    np.testing.assert_array_equal(np.sort(order, 1), np.tile(np.arange(12), (2, 1)))
    expected = np.take_along_axis(x[:, 1:], order[..., None], 1)
    np.testing.assert_allclose(out.x[:, 1:], expected, atol=1e-4)
    np.testing.assert_array_equal(out.x[:, 0], x[:, 0])


def test_weighted_sums_are_conserved_and_no_cluster_is_empty():
    """DPC-2, DPC-3, and every output lies among its members, or fades; weights may be huge."""
    x = draw()
    for scale in (1.0, 50.0):
        out, _, sites = reduce(x, params(scale))
        logits = x[:, 1:] @ params(scale)["score"]["kernel"] + 0.3
        weights = np.exp((logits - logits.max(1, keepdims=True))[..., 0].astype(np.float64))
        cluster = sites["cluster"]
        np.testing.assert_array_equal(cluster, out.group)
        np.testing.assert_array_equal(
            np.take_along_axis(cluster, sites["centres"], 1),
            np.tile(np.arange(5), (2, 1)),
        )
        for i in range(2):
            sums = np.stack([weights[i][cluster[i] == c].sum() for c in range(KEEP)])
            assert (sums > 0).all()
            np.testing.assert_allclose(sums @ out.x[i, 1:], weights[i] @ x[i, 1:], atol=1e-5)
            for c in range(KEEP):
                members = np.vstack([np.zeros(6), x[i, 1:][cluster[i] == c]])
                assert (out.x[i, 1 + c] >= members.min(0) - 1e-5).all()
                assert (out.x[i, 1 + c] <= members.max(0) + 1e-5).all()


def test_blobs_are_found():
    """DPC-4: as many clusters as there are."""
    rng = np.random.default_rng(0)
    label = np.repeat([0, 1, 2], 4)[rng.permutation(12)]
    centre = 20 * np.eye(3, 6)
    x = draw() * 0.1
    x[:, 1:] += centre[label]
    _, _, sites = reduce(x, {}, 3, True)
    for cluster in sites["cluster"]:
        assert {(a, b) for a, b in zip(cluster, label, strict=True)} == {
            (cluster[label == c][0], c) for c in range(3)
        }
        assert len(set(cluster)) == 3


def test_wide_features_do_not_underflow_and_order_does_not_matter():
    """Densities of exp(-10^4) still differ; U6: the same clusters from shuffled tokens; DPC-6."""
    x = draw()
    large = 100 * x
    _, _, sites = reduce(large, {}, KEEP, True)
    assert len(set(sites["centres"][0])) == KEEP
    assert (sites["centres"] != np.arange(KEEP)).any()

    order = np.random.default_rng(1).permutation(12)
    shuffled = np.concatenate([x[:, :1], x[:, 1:][:, order]], axis=1)
    rotation = np.linalg.qr(np.random.default_rng(2).normal(size=(6, 6)))[0].astype(np.float32)
    _, _, plain = reduce(x, {}, KEEP, True)
    _, _, moved = reduce(shuffled, {}, KEEP, True)
    np.testing.assert_array_equal(order[moved["centres"]], plain["centres"])
    np.testing.assert_array_equal(moved["cluster"], plain["cluster"][:, order])
    _, _, turned = reduce(x @ rotation + 3, {}, KEEP, True)
    np.testing.assert_array_equal(turned["cluster"], plain["cluster"])
    assert (sites["cluster"] != plain["cluster"]).any()


def test_positions_are_the_means_of_their_patches():
    out, _, _ = reduce(draw(), {}, KEEP, True)
    places = np.stack(np.divmod(np.arange(12), 4), axis=1)
    for position, group, index in zip(out.position, out.group, out.index, strict=True):
        members = [places[group == token] for token in range(KEEP)]
        np.testing.assert_allclose(position, [m.mean(0) for m in members], atol=1e-5)
        np.testing.assert_array_equal(index >= 0, [len(m) == 1 for m in members])


def test_fusion_is_refused_with_a_reason():
    with pytest.raises(ConfigError, match="'dpc_knn' merges tokens instead of pruning them"):
        models.create(
            {
                "variant": "ti",
                "image_size": 64,
                "num_classes": 2,
                "reduction": {"name": "dpc_knn", "rate": 1, "fusion": "llf"},
            }
        )
