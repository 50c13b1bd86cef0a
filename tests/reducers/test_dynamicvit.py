"""DynamicViT: the reference's numbers, masking that equals removal, decisions that learn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokred
from conftest import fixture_names, load_fixture, random_params

from cropr_jax import models
from cropr_jax.core import rng, schedule
from cropr_jax.core.attention import attend, attend_masked
from cropr_jax.core.reducer import Context
from cropr_jax.models.blocks import Block, pool
from cropr_jax.reducers.dynamicvit import DynamicViT, straight_through
from cropr_jax.tokens import Tokens, from_features

PATCHES, COUNTS = 16, (12, 9)

attend, attend_masked = jax.jit(attend), jax.jit(attend_masked)
pool = jax.jit(pool, static_argnums=1)


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

    @jax.jit
    def apply(params, tokens):
        tokens, _ = block.apply({"params": params}, tokens, None, method="attend")
        return block.apply({"params": params}, tokens, None, method="feed_forward")

    tokens = apply(params["block_0"], tokens)
    np.testing.assert_allclose(tokens.x, arrays["out/policy_block.0"], atol=tokred.TOKENS)


@pytest.fixture
def qkv():
    return np.random.default_rng(0).normal(size=(3, 2, 7, 2, 4)).astype(np.float32)


def test_masking_nothing_is_plain_attention(qkv):
    found = attend_masked(*qkv, np.ones((2, 7), np.float32))
    np.testing.assert_allclose(found, attend(*qkv, None), atol=1e-5)


def test_masking_equals_removing(qkv):
    """And what is masked sees itself and the others that stay."""
    policy = np.array([[1, 1, 0, 1, 0, 0, 1], [1, 0, 0, 1, 1, 1, 0]], np.float32)
    found = np.asarray(attend_masked(*qkv, policy))
    for row, mask in enumerate(policy > 0):
        stay = qkv[:, row : row + 1, mask]
        np.testing.assert_allclose(found[row, mask], np.asarray(attend(*stay, None))[0], atol=1e-5)
        hidden = int(np.flatnonzero(~mask)[0])
        mask[hidden] = True
        seen = qkv[:, row : row + 1, mask]
        alone = np.asarray(attend(*seen, None))[0, mask[:hidden].sum()]
        np.testing.assert_allclose(found[row, hidden], alone, atol=1e-5)
    x = np.random.default_rng(1).normal(size=(2, 7, 3)).astype(np.float32)
    masked = Tokens(x, np.zeros((2, 6), np.int32), prefix=1, policy=policy)
    for name, start in (("mean_all", 0), ("mean_patches", 1)):
        left = [row[start:][mask[start:] > 0].mean(0) for row, mask in zip(x, policy, strict=True)]
        np.testing.assert_allclose(pool(masked, name), np.stack(left), atol=1e-6)


def test_what_is_masked_gets_a_gradient(qkv):
    policy = np.ones((2, 7), np.float32)
    policy[:, 3] = 0
    gradient = jax.jit(jax.grad(lambda p: (attend_masked(*qkv, p) ** 2).sum()))(policy)
    assert (np.abs(np.asarray(gradient)[:, 3]) > 1e-3).all()


def test_decisions_follow_the_probability():
    log_p = np.log(np.tile(np.array([0.7, 0.3], np.float32), (1, 20_000, 1)))

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def decide(log_p):
        noise = rng.gumbel(rng.example_keys(jax.random.key(0), 0, jnp.arange(1)), (20_000, 2))
        hard = straight_through(log_p, noise)
        return hard.mean(), hard

    (decision, hard), pull = jax.device_get(decide(log_p))
    np.testing.assert_allclose(decision, 0.7, atol=0.015)
    assert (pull[..., 0] > 0).all() and (pull[..., 1] < 0).all()
    np.testing.assert_allclose(hard, hard > 0.5, atol=1e-6)


def build(**fields):
    base = {"width": 8, "depth": 3, "heads": 2, "patch": 4, "image_size": 16, "num_classes": 5}
    reduction = {"name": "dynamicvit", "rate": 1, "fusion": "none"}
    model = models.create(base | {"reduction": reduction} | fields)
    return model.clone(schedule=schedule.to_counts(3, PATCHES, (1, 2), COUNTS))


@jax.jit
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


@pytest.mark.slow
def test_training_masks_and_inference_removes():
    model = build()
    params = random_params(model)
    gradients, (out, extra) = jax.device_get(train(model, params, *batch()))
    first, second = (site["kept"] for site in out["sites"])
    assert [features.shape[1] for features in out["features"]] == [PATCHES + 1] * 3
    assert (second <= first + 1e-6).all() and (second < first - 0.5).any()
    ratio = [
        2 * ((kept.mean(1) - count / PATCHES) ** 2).mean()
        for kept, count in zip((first, second), COUNTS, strict=True)
    ]
    np.testing.assert_allclose(extra["ratio"], np.mean(ratio), rtol=1e-5)
    for site in ("reducer_0", "reducer_1"):
        assert np.abs(gradients[site]["predictor"]["embed"]["kernel"]).max() > 0

    apply = jax.jit(model.apply, static_argnames="train")
    _, out = apply({"params": params}, batch()[0])
    assert tuple(kept.shape[1] for kept in out["kept"]) == COUNTS
    with pytest.raises(ValueError, match="draws at random"):
        apply({"params": params}, batch()[0], train=True)


@pytest.mark.slow
def test_finite_when_every_patch_is_dropped():
    model = build(pool="mean_patches")
    params = random_params(model)
    for site in ("reducer_0", "reducer_1"):
        params[site]["predictor"]["fc3"]["bias"] = jnp.array([-1e3, 1e3])
    gradients, (out, _) = jax.device_get(train(model, params, *batch()))
    assert (out["sites"][0]["kept"] == 0).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_ratio_loss_is_zero_at_the_target():
    x = np.random.default_rng(0).normal(size=(1, 9, 8)).astype(np.float32)
    module, keys = DynamicViT(), batch()[1][:1]

    def site(call, keep, *params):
        tokens = from_features(jnp.asarray(x), (2, 4), 1)
        return call(*params, tokens, Context(keys=keys), keep=keep, train=True)

    draw = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: draw.normal(scale=0.3, size=leaf.shape).astype(leaf.dtype),
        jax.eval_shape(lambda: site(module.init, 4, jax.random.key(0))),
    )
    apply = jax.jit(lambda params, keep: site(module.apply, keep, params)[2], static_argnums=1)
    kept = round(float(np.sum(apply(params, 4)["kept"])))
    for keep, found in ((kept, 0.0), (kept - 2, 2 * (2 / 8) ** 2)):
        assert keep > 0
        out = apply(params, keep)
        np.testing.assert_allclose(out["ratio"], found, atol=1e-6)
