"""The Cropr module against the authors' code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import fixture_names, load_fixture
from flax import traverse_util

from cropr_jax.convert.timm import cropr_leaf
from cropr_jax.cropr import Cropr
from cropr_jax.reducers import Context
from cropr_jax.tokens import from_features

pytestmark = pytest.mark.parity
NAMES = fixture_names("cropr_cls") + fixture_names("cropr_segm")


def tolerance(queries: int) -> float:
    """Scores are sums over the queries: their error grows with them."""
    return 1e-5 if queries == 1 else 2e-5


def build(meta, slim=False):
    args = meta["config"]["args"]
    assert args["q_proj"] == args["k_proj"] == args["v_proj"]
    return Cropr(
        num_outputs=args["num_classes"],
        num_queries=args["num_queries"],
        heads=args["num_heads"],
        projections=args["k_proj"],
        pre_norm=args["pre_attn_norm"],
        mlp=args["mlp"],
        slim=slim,
    )


def tree(arrays, prefix):
    leaves = (
        cropr_leaf("", key.removeprefix(prefix), value)
        for key, value in arrays.items()
        if key.startswith(prefix)
    )
    return traverse_util.unflatten_dict(dict(leaves), sep="/")


def tokens_of(arrays):
    x = jnp.asarray(arrays["in/x"])
    return from_features(x, (1, x.shape[1] - 1), prefix=1)


def order_of(kept, pruned):
    """Positions of all tokens, CLS first, as the reference counts them."""
    cls = np.zeros((kept.index.shape[0], 1), np.int32)
    return np.concatenate([cls, kept.index + 1, pruned.index + 1], axis=1)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients(name):
    arrays, meta = load_fixture(name)
    module, params = build(meta), tree(arrays, "w/")
    tokens = tokens_of(arrays)
    keep = tokens.patches - meta["config"]["args"]["pruning_rate"]
    labels = jnp.asarray(arrays["in/labels"])

    def loss(params):
        kept, pruned, out = module.apply(
            {"params": params}, tokens, Context(), keep=keep, train=True
        )
        logits = out["auxiliary"].reshape(-1, out["auxiliary"].shape[-1])
        picked = jax.nn.log_softmax(logits)[jnp.arange(labels.size), labels.ravel()]
        return -picked.mean(), (kept, pruned, out)

    (value, (kept, pruned, out)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        params
    )
    atol = tolerance(meta["config"]["args"]["num_queries"])
    np.testing.assert_array_equal(order_of(kept, pruned), arrays["out/order"])
    np.testing.assert_allclose(out["scores"], arrays["out/scores"][:, 1:], atol=atol)
    np.testing.assert_allclose(kept.x, arrays["out/kept"], atol=0)
    np.testing.assert_allclose(pruned.x, arrays["out/pruned"], atol=0)
    np.testing.assert_allclose(
        out["auxiliary"].reshape(arrays["out/pred"].shape), arrays["out/pred"], atol=atol
    )
    np.testing.assert_allclose(value, arrays["out/loss"][0], atol=1e-5)

    expected = traverse_util.flatten_dict(tree(arrays, "out/grad/"), sep="/")
    found = traverse_util.flatten_dict(gradients, sep="/")
    assert found.keys() == expected.keys()
    for leaf, gradient in expected.items():
        np.testing.assert_allclose(found[leaf], gradient, atol=1e-5, err_msg=leaf)


@pytest.mark.parametrize("name", NAMES)
def test_slim_form(name):
    arrays, meta = load_fixture(name)
    params = Cropr.slim_params(tree(arrays, "w/"))
    tokens = tokens_of(arrays)
    keep = tokens.patches - meta["config"]["args"]["pruning_rate"]
    kept, pruned, out = build(meta, slim=True).apply(
        {"params": params}, tokens, Context(), keep=keep, train=False
    )
    atol = tolerance(meta["config"]["args"]["num_queries"])
    np.testing.assert_array_equal(order_of(kept, pruned), arrays["out/order"])
    np.testing.assert_allclose(out["scores"], arrays["out/inference/scores"][:, 1:], atol=atol)
    np.testing.assert_allclose(kept.x, arrays["out/inference/kept"], atol=0)
    np.testing.assert_allclose(pruned.x, arrays["out/inference/pruned"], atol=0)
