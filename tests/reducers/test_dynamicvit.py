"""DynamicViT: the reference's numbers, masking that equals removal, decisions that learn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokred
from conftest import fixture_names, load_fixture, random_params

from cropr_jax import models, rng, schedule
from cropr_jax.attention import attend, attend_masked
from cropr_jax.models.blocks import Block, pool
from cropr_jax.reducers.base import Context
from cropr_jax.reducers.dynamicvit import DynamicViT, straight_through
from cropr_jax.tokens import Tokens, from_features

PATCHES, COUNTS = 16, (12, 9)


def convert(weights):
    return {
        "predictor": {
            "norm": tokred.norm(weights, "in_conv.0"),
            "embed": tokred.linear(weights, "in_conv.1"),
            "fc1": tokred.linear(weights, "out_conv.0"),
            "fc2": tokred.linear(weights, "out_conv.2"),
            "fc3": tokred.linear(weights, "out_conv.4"),
        }
    }


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("tokred_dyvit"))
def test_reference(name):
    arrays, meta = load_fixture(name)
    kwargs, config = meta["config"]["kwargs"], meta["config"]
    patches = (kwargs["img_size"] // kwargs["patch_size"]) ** 2
    model = tokred.build(meta, "dynamicvit", [patches * rate for rate in config["token_ratio"]])
    params = tokred.params(arrays, meta, "score_predictor", convert)
    _, out = tokred.run(model, params, arrays)
    before = None
    for site, block in enumerate(config["args"]["reduction_loc"]):
        expected = arrays[f"out/reduce.{site}/out0"]
        np.testing.assert_allclose(out["sites"][site]["log_p"], expected, atol=tokred.TOKENS)
        # Ours are places in the image, theirs in what the site before left.
        kept = arrays[f"out/viz.{block}/Kept_Tokens"]
        before = kept if before is None else np.take_along_axis(before, kept, 1)
        np.testing.assert_array_equal(out["kept"][site], before)

    tokens = from_features(jnp.asarray(arrays["out/block.0"]), model.grid, 1)
    tokens = tokens.replace(policy=jnp.asarray(arrays["in/policy"][..., 0]))
    block = Block(heads=model.heads, hidden=model.hidden)
    tokens, _ = block.apply({"params": params["block_0"]}, tokens, None, method="attend")
    tokens = block.apply({"params": params["block_0"]}, tokens, None, method="feed_forward")
    np.testing.assert_allclose(tokens.x, arrays["out/policy_block.0"], atol=tokred.TOKENS)


@pytest.fixture
def qkv():
    return jax.random.normal(jax.random.key(0), (3, 2, 7, 2, 4))


def test_masking_nothing_is_plain_attention(qkv):
    found = attend_masked(*qkv, jnp.ones((2, 7)))
    np.testing.assert_allclose(found, attend(*qkv, None), atol=1e-5)


def test_masking_equals_removing(qkv):
    """And what is masked sees itself and the others that stay."""
    policy = jnp.array([[1, 1, 0, 1, 0, 0, 1], [1, 0, 0, 1, 1, 1, 0]], jnp.float32)
    found = attend_masked(*qkv, policy)
    for row, mask in enumerate(np.asarray(policy) > 0):
        stay = qkv[:, row : row + 1, mask]
        np.testing.assert_allclose(found[row, mask], attend(*stay, None)[0], atol=1e-5)
        hidden = int(np.flatnonzero(~mask)[0])
        mask[hidden] = True
        seen = qkv[:, row : row + 1, mask]
        alone = attend(*seen, None)[0][mask[:hidden].sum()]
        np.testing.assert_allclose(found[row, hidden], alone, atol=1e-5)
    x = jax.random.normal(jax.random.key(1), (2, 7, 3))
    masked = Tokens(x, jnp.zeros((2, 6), jnp.int32), prefix=1, policy=policy)
    for name, start in (("mean_all", 0), ("mean_patches", 1)):
        left = [row[start:][mask[start:] > 0].mean(0) for row, mask in zip(x, policy, strict=True)]
        np.testing.assert_allclose(pool(masked, name), jnp.stack(left), atol=1e-6)


def test_what_is_masked_gets_a_gradient(qkv):
    policy = jnp.ones((2, 7)).at[:, 3].set(0)
    gradient = jax.grad(lambda p: (attend_masked(*qkv, p) ** 2).sum())(policy)
    assert (jnp.abs(gradient[:, 3]) > 1e-3).all()


def test_decisions_follow_the_probability():
    log_p = jnp.log(jnp.tile(jnp.array([0.7, 0.3]), (1, 20_000, 1)))
    noise = rng.gumbel(rng.example_keys(jax.random.key(0), 0, jnp.arange(1)), (20_000, 2))
    decision, pull = jax.value_and_grad(lambda p: straight_through(p, noise).mean())(log_p)
    np.testing.assert_allclose(decision, 0.7, atol=0.015)
    assert (pull[..., 0] > 0).all() and (pull[..., 1] < 0).all()
    hard = straight_through(log_p, noise)
    np.testing.assert_allclose(hard, hard > 0.5, atol=1e-6)


def build(**fields):
    base = {"width": 8, "depth": 3, "heads": 2, "patch": 4, "image_size": 16, "num_classes": 5}
    reduction = {"name": "dynamicvit", "rate": 1, "fusion": "none"}
    model = models.create(base | {"reduction": reduction} | fields)
    return model.clone(schedule=schedule.to_counts(3, PATCHES, (1, 2), COUNTS))


def batch():
    images = jax.random.normal(jax.random.key(1), (2, 16, 16, 3))
    return images, rng.example_keys(jax.random.key(2), 0, jnp.arange(2))


@functools.partial(jax.jit, static_argnums=0)
def train(model, params, images, keys):
    def loss(params):
        logits, out = model.apply({"params": params}, images, train=True, keys=keys)
        extra = model.reducer_losses(out, lambda x, places: x.sum())
        return (logits**2).sum() + sum(extra.values()), (out, extra)

    return jax.grad(loss, has_aux=True)(params)


def test_training_masks_and_inference_removes():
    model = build()
    params = random_params(model)
    gradients, (out, extra) = train(model, params, *batch())
    first, second = (site["kept"] for site in out["sites"])
    assert [features.shape[1] for features in out["features"]] == [PATCHES + 1] * 3
    assert (second <= first + 1e-6).all() and (second < first - 0.5).any()
    ratio = [
        2 * ((kept.mean(1) - count / PATCHES) ** 2).mean()
        for kept, count in zip((first, second), COUNTS, strict=True)
    ]
    np.testing.assert_allclose(extra["ratio"], np.mean(ratio), rtol=1e-5)
    for site in ("reducer_0", "reducer_1"):
        assert jnp.abs(gradients[site]["predictor"]["embed"]["kernel"]).max() > 0

    _, out = model.apply({"params": params}, batch()[0])
    assert tuple(kept.shape[1] for kept in out["kept"]) == COUNTS
    with pytest.raises(ValueError, match="draws at random"):
        model.apply({"params": params}, batch()[0], train=True)


def test_finite_when_every_patch_is_dropped():
    model = build(pool="mean_patches")
    params = random_params(model)
    for site in ("reducer_0", "reducer_1"):
        params[site]["predictor"]["fc3"]["bias"] = jnp.array([-1e3, 1e3])
    gradients, (out, _) = train(model, params, *batch())
    assert (out["sites"][0]["kept"] == 0).all()
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_ratio_loss_is_zero_at_the_target():
    tokens = from_features(jax.random.normal(jax.random.key(0), (1, 9, 8)), (2, 4), 1)
    module, context = DynamicViT(), Context(keys=batch()[1][:1])
    params = module.init(jax.random.key(0), tokens, context, keep=4, train=True)
    _, _, out = module.apply(params, tokens, context, keep=4, train=True)
    kept = round(float(out["kept"].sum()))
    for keep, found in ((kept, 0.0), (kept - 2, 2 * (2 / 8) ** 2)):
        _, _, out = module.apply(params, tokens, context, keep=keep, train=True)
        np.testing.assert_allclose(out["ratio"], found, atol=1e-6)
