"""ATS: the reference's numbers, and what sampling by the inverse distribution promises."""

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
from cropr_jax.models.blocks import Block, pool
from cropr_jax.reducers import Context, ats
from cropr_jax.reducers.ats import ATS, invert_cdf, levels, significance
from cropr_jax.tokens import from_features

FIELDS = {
    "width": 8,
    "depth": 3,
    "heads": 2,
    "patch": 4,
    "image_size": 16,
    "num_classes": 3,
    "pool": "cls",
}


@functools.partial(jax.jit, static_argnums=(1, 2))
def multiplicities(scores, keep, variant="paper"):
    """How often each token is hit, of scores that sum to 1."""
    valid = jnp.ones(scores.shape, bool)
    chosen = invert_cdf(jnp.cumsum(scores, 1), valid, levels(keep, variant), variant)
    return (chosen[:, :, None] == jnp.arange(scores.shape[1])).sum(1)


def draw(rows, tokens, seed=0):
    scores = np.random.default_rng(seed).gamma(0.5, size=(rows, tokens)).astype(np.float32)
    return scores / scores.sum(1, keepdims=True)


@functools.partial(jax.jit, static_argnums=3)
def sample(row, values, valid, variant, at):
    """Tokens that the rule chooses with these levels."""
    scores = significance(row, jnp.linalg.norm(values, axis=-1), 1)
    return invert_cdf(jnp.cumsum(scores, 1), valid, at, variant)


def normal(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("tokred_ats"))
def test_sampling_of_token_reduction(name):
    """With the attention, values and levels of each site."""
    arrays, meta = load_fixture(name)
    for block in meta["config"]["args"]["reduction_loc"]:
        site = tokred.strip(arrays, f"out/ats.{block}/")
        valid = site["mask_in"][:, 1:].astype(bool)
        steps, row = site["sample_steps"], site["attn"][:, :, 0]
        chosen = np.asarray(sample(row, site["v"], valid, "tokenreduction", steps))
        for i, ids in enumerate(site["ids"]):
            expected = ids[site["mask"][i] > 0][1:]
            np.testing.assert_array_equal(np.unique(chosen[i]) + 1, expected)


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("tokred_ats"))
def test_vit_of_token_reduction(name, monkeypatch):
    """Padding aside, which they cut at the image with most tokens of the batch.

    With their levels: by rounding there is one more of them for some counts.
    """
    arrays, meta = load_fixture(name)
    blocks = meta["config"]["args"]["reduction_loc"]
    steps = [arrays[f"out/ats.{block}/sample_steps"] for block in blocks]
    for at, total in zip(steps, meta["config"]["sample_count"][blocks[0] :], strict=True):
        if len(at) == int(total) - 1:
            np.testing.assert_allclose(levels(len(at), "tokenreduction"), at, atol=1e-6)
    by_count = {len(at): at for at in steps}
    monkeypatch.setattr(ats, "levels", lambda count, variant: by_count[count])

    model = tokred.build(meta, "ats", [len(at) for at in steps])
    model = model.clone(
        schedule=tokred.one_block_later(model.schedule),
        reducer_options=(("variant", "tokenreduction"),),
    )
    params = params_from_state_dict(tokred.strip(arrays, "w/"), model)
    images = arrays["in/x"].transpose(0, 2, 3, 1)
    logits, out = jax.device_get(jax.jit(model.apply)({"params": params}, images))
    np.testing.assert_allclose(logits, arrays["out/logits"], atol=tokred.TOKENS)
    for block in blocks:
        mask = arrays[f"out/ats.{block}/mask"] > 0
        expected = arrays[f"out/block.{block}"]
        for i, row in enumerate(mask):
            count = row.sum()
            np.testing.assert_allclose(
                out["features"][block][i, :count], expected[i, row], atol=tokred.TOKENS
            )
            kept = out["kept"][blocks.index(block)][i]
            assert (kept[: count - 1] >= 0).all() and (kept[count - 1 :] == -1).all()


def test_equal_scores_select_every_token_once():
    """ATS-1; the nearest rule does not."""
    scores = np.full((1, 12), 1 / 12, np.float32)
    np.testing.assert_array_equal(multiplicities(scores, 12), 1)
    assert (np.asarray(multiplicities(scores, 12, "tokenreduction")) == 0).any()


def test_multiplicity_follows_the_scores():
    """ATS-2, ATS-3: a token of share S is hit K S times, give or take one."""
    scores = draw(50, 12)
    hits = np.asarray(multiplicities(scores, 7))
    assert (hits.sum(1) == 7).all()
    assert (hits[scores > 1 / 7] > 0).all() and (hits == 0).any()
    assert (np.abs(hits - 7 * scores) <= 1 + 1e-5).all()


def test_a_budget_of_three_times_as_many_contains_the_set():
    """ATS-5: the levels nest."""
    scores = draw(50, 12)
    few, many = (np.asarray(multiplicities(scores, keep)) > 0 for keep in (3, 9))
    assert (few <= many).all()


def test_significance_by_hand():
    row, norm = np.random.default_rng(0).uniform(size=(2, 2, 3, 5)).astype(np.float32)
    found = jax.jit(significance, static_argnums=2)
    product = (row * norm).sum(1)[:, 1:]
    np.testing.assert_allclose(
        found(row, norm, 1), product / product.sum(1, keepdims=True), rtol=1e-6
    )
    assert (np.asarray(found(row, 0 * norm, 1)) == 0).all()


def test_padding_stands_behind_and_is_never_chosen_again():
    """Two sites; the second one samples from what the first one left."""
    x = normal(3, 13, 2)
    rows = draw(3, 13)[:, None] ** 2

    @jax.jit
    def twice(x, rows):
        context = Context(cls_row=rows, v_norm=jnp.ones(rows.shape))
        once, gone, _ = ATS().apply({}, from_features(x, (3, 4), 1), context, keep=9, train=False)
        assert gone is None
        # The attention of the next block: padding gets none.
        masked = jnp.where(once.valid[:, None], 0.1, 0.0)
        context = Context(cls_row=masked, v_norm=jnp.ones(masked.shape))
        return once, ATS().apply({}, once, context, keep=8, train=False)[0]

    once, after = jax.device_get(twice(x, rows))
    for tokens in (once, after):
        valid, index = tokens.valid, tokens.index
        assert valid[:, 0].all() and not valid.all()
        for i in range(3):
            count = valid[i].sum() - 1
            assert valid[i, : count + 1].all() and (index[i, count:] == -1).all()
            chosen = index[i, :count]
            assert (np.diff(chosen) > 0).all() and chosen[0] >= 0
            np.testing.assert_array_equal(tokens.x[i, 1 : count + 1], x[i, 1 + chosen])
    assert after.valid.sum() > 3 and set(after.index.ravel()) <= set(once.index.ravel())


def tokens_of(x, grid):
    """Tokens of CLS and a grid, on the host."""
    return jax.device_get(jax.jit(from_features, static_argnums=(1, 2))(x, grid, 1))


@functools.cache
def attention():
    """The attention half of a block with random weights, as a function of tokens."""
    block = Block(heads=2, hidden=16, prefix=1)
    tokens = tokens_of(np.zeros((1, 7, 8), np.float32), (2, 3))
    variables = jax.jit(lambda key: block.init(key, tokens, None, method="attend"))(
        jax.random.key(0)
    )
    apply = jax.jit(lambda tokens: block.apply(variables, tokens, None, method="attend")[0].x)
    return lambda tokens: np.asarray(apply(tokens))


def test_a_token_that_is_kept_twice_is_one_of_size_two():
    """ATS-4: what multiplicity would mean to later attention; the paper keeps a token once."""
    chosen = np.array([0, 0, 1, 3, 3, 3])
    places, first, counts = np.unique(chosen, return_index=True, return_counts=True)
    x = normal(1, 5, 8)
    often = tokens_of(x[:, [0, *1 + chosen]], (2, 3))
    once = tokens_of(x[:, [0, *1 + places]], (1, 3))
    sized = once.replace(size=np.array([[1.0, *counts]], np.float32))
    expected = attention()(often)[:, [0, *1 + first]]
    np.testing.assert_allclose(attention()(sized), expected, atol=1e-5)
    assert np.abs(attention()(once) - expected).max() > 1e-3


def test_masked_padding_is_as_good_as_removed():
    """ATS-6: neither later attention nor pooling sees it."""
    tokens = tokens_of(normal(1, 7, 8), (2, 3))
    masked = tokens.replace(valid=np.array([[True] * 5 + [False] * 2]))
    changed = tokens.x.copy()
    changed[:, 5:] += 100
    other = masked.replace(x=changed)
    cut = tokens.replace(x=tokens.x[:, :5], index=tokens.index[:, :4])
    np.testing.assert_allclose(attention()(masked)[:, :5], attention()(cut), atol=1e-5)
    np.testing.assert_allclose(attention()(other)[:, :5], attention()(cut), atol=1e-5)
    pooled = jax.jit(pool, static_argnums=1)
    for name in ("mean_patches", "mean_all"):
        np.testing.assert_allclose(pooled(other, name), pooled(cut, name), atol=1e-6)


def test_refusals():
    reduction = {"name": "ats", "rate": 2, "fusion": "llf"}
    with pytest.raises(ConfigError, match="'ats' prunes another number of tokens in every image"):
        models.create(FIELDS | {"reduction": reduction})
    reduction |= {"fusion": "none", "options": {"variant": "official"}}
    with pytest.raises(ConfigError, match="ats variant: found 'official', expected one of"):
        models.create(FIELDS | {"reduction": reduction})
