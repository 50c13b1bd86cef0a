"""ToMe: the authors' numbers, and what merging must conserve."""

import functools

import jax
import numpy as np
import pytest
import tokred
from conftest import fixture_names, load_fixture, random_params

from cropr_jax import models
from cropr_jax.convert.timm import params_from_state_dict
from cropr_jax.core.attention import attend
from cropr_jax.core.schedule import Schedule
from cropr_jax.errors import ConfigError, ScheduleError
from cropr_jax.reducers import Context
from cropr_jax.reducers.tome import ToMe, match, merge
from cropr_jax.tokens import MASKED, Tokens, from_features, unmerge

GRID, PATCHES, PREFIX, WIDTH = (3, 5), 15, 1, 6


def tokens_of(seed=0, prefix=PREFIX, width=WIDTH):
    return grid_of(draw(seed, 2, prefix + PATCHES, width), GRID, prefix)


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def on_host(function, **static):
    """The function compiled, with NumPy results."""
    compiled = jax.jit(function, **static)
    return lambda *args: jax.device_get(compiled(*args))


grid_of = on_host(from_features, static_argnums=(1, 2))
match = on_host(match, static_argnums=(1, 2))
merge = on_host(merge)
unmerge = on_host(unmerge)
attend = on_host(attend)
key_bias = on_host(Tokens.key_bias)


@functools.partial(on_host, static_argnums=2)
def reduce(tokens, metric, keep):
    return ToMe().apply({}, tokens, Context(k_mean=metric), keep=keep, train=False)[0]


def reduce_at_random(tokens, keep, seed):
    return reduce(tokens, draw(seed, *tokens.x.shape), keep)


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("tome_matching"))
def test_matching_of_the_reference(name):
    arrays, meta = load_fixture(name)
    for case in meta["config"]["cases"]:
        n, prefix = case["n"], int(case["class_token"])
        metric, x = arrays[f"in/metric.{n}"], arrays[f"in/x.{n}"]
        side = metric.shape[1] - prefix
        order, partner = match(metric[:, prefix:], case["effective_r"], prefix)
        ones = np.ones((len(x), side), np.float32)
        merged, size = merge(x[:, prefix:], ones, order, partner)
        np.testing.assert_array_equal(size, arrays[f"out/size.{n}"][:, prefix:, 0])
        np.testing.assert_allclose(merged, arrays[f"out/merged.{n}"][:, prefix:], atol=1e-6)
        # A merged token of size two and more is the plain mean too: all sizes are one.
        np.testing.assert_allclose(merged, arrays[f"out/mean_merge.{n}"][:, prefix:], atol=1e-6)

        tokens = grid_of(x, (1, side), prefix)
        left = side - case["effective_r"]
        once = reduce(tokens, metric, left)
        source = arrays[f"out/source.{n}"][:, prefix:, prefix:]
        np.testing.assert_array_equal(once.group, source.argmax(1))
        back = unmerge(once.x[:, prefix:], once.group)
        np.testing.assert_allclose(back, arrays[f"out/unmerged.{n}"][:, prefix:], atol=1e-6)

        # Merging the metric like the tokens gives that of the second round.
        second, _ = merge(metric[:, prefix:], ones, order, partner)
        second = np.concatenate([metric[:, :prefix], second], axis=1)
        twice = reduce(once, second, left - case["second_round_r"])
        np.testing.assert_array_equal(twice.size, arrays[f"out/size2.{n}"][..., 0])
        np.testing.assert_allclose(twice.x, arrays[f"out/merged2.{n}"], atol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("tome_vit_"))
def test_vit_of_the_reference(name):
    arrays, meta = load_fixture(name)
    kwargs, config = meta["config"]["kwargs"], meta["config"]
    model = models.create(
        {
            "image_size": kwargs["img_size"],
            "patch": kwargs["patch_size"],
            "width": kwargs["embed_dim"],
            "depth": kwargs["depth"],
            "heads": kwargs["num_heads"],
            "num_classes": kwargs["num_classes"],
            "pool": {"avg": "mean_patches", "token": "cls"}[kwargs["global_pool"]],
            "reduction": {
                "name": "tome",
                "rate": 1,
                "fusion": "none",
                "options": {"proportional": config["prop_attn"]},
            },
        }
    )
    sites = tuple((i + 1, r) for i, r in enumerate(config["r_per_block"]))
    model = model.clone(schedule=Schedule(model.depth, sites))
    params = params_from_state_dict(tokred.strip(arrays, "w/"), model)
    _, out = tokred.run(model, params, arrays)
    source = arrays["out/source"][:, 1:, 1:]
    np.testing.assert_array_equal(out["group"].reshape(len(source), -1), source.argmax(1))


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("tokred_tome"))
def test_token_reduction(name):
    arrays, meta = load_fixture(name)
    model = tokred.build(meta, "tome", meta["config"]["token_ratio"])
    model = model.clone(schedule=tokred.one_block_later(model.schedule))
    params = params_from_state_dict(tokred.strip(arrays, "w/"), model)
    _, out = tokred.run(model, params, arrays)
    first, second = (
        arrays[f"out/viz.{block}/Assignment_Maps"].astype(int)
        for block in meta["config"]["args"]["reduction_loc"]
    )
    np.testing.assert_array_equal(
        out["group"].reshape(first.shape), np.take_along_axis(second, first, 1)
    )


def test_sums_sizes_and_the_prefix_are_conserved():
    """TOME-1 to TOME-4, over three sites."""
    tokens = first = tokens_of()
    for site, keep in enumerate((11, 8, 4)):
        tokens = reduce_at_random(tokens, keep, site)
        np.testing.assert_allclose(
            (tokens.x * tokens.size[..., None]).sum(1), first.x.sum(1), atol=1e-5
        )
        np.testing.assert_array_equal(tokens.size.sum(1), PREFIX + PATCHES)
        np.testing.assert_array_equal(tokens.size, np.round(tokens.size))
        np.testing.assert_array_equal(tokens.x[:, 0], first.x[:, 0])
        np.testing.assert_array_equal(tokens.size[:, 0], 1)
        held = (tokens.group[:, None] == np.arange(keep)[:, None]).sum(-1)
        np.testing.assert_array_equal(held, tokens.size[:, 1:])
        np.testing.assert_array_equal(tokens.index >= 0, tokens.size[:, 1:] == 1)


def test_positions_are_the_means_of_their_patches():
    """So rotary embeddings turn a merged token by the middle of what it stands for."""
    tokens = reduce_at_random(reduce_at_random(tokens_of(), 10, 1), 6, 2)
    places = np.stack(np.divmod(np.arange(PATCHES), GRID[1]), axis=1)
    for position, group in zip(tokens.position, tokens.group, strict=True):
        means = [places[group == token].mean(0) for token in range(6)]
        np.testing.assert_allclose(position, means, atol=1e-5)


def test_merging_what_was_unmerged_gives_the_same():
    """TOME-5, and TOME-7: equal tokens stay what they are."""
    tokens, ones = tokens_of(), np.ones((2, PATCHES), np.float32)
    order, partner = match(tokens.x[:, 1:], 5, PREFIX)
    once = reduce(tokens, tokens.x, 10)
    again, size = merge(unmerge(once.x[:, 1:], once.group), ones, order, partner)
    np.testing.assert_allclose(again, once.x[:, 1:], atol=1e-6)
    assert size.max() > 1
    equal = np.broadcast_to(tokens.x[:, :1], (2, PATCHES, WIDTH))
    np.testing.assert_allclose(merge(equal, ones, order, partner)[0], equal[:, :10], atol=1e-6)


def test_the_order_of_tokens():
    """Even ones that stay in their order, then all odd ones; TOME-8: a twin pair merges."""
    x = draw(0, 2, 1 + PATCHES, WIDTH)
    x[:, 4] = x[:, 7]  # CLS stands at 0: patch 3 is even, patch 6 is odd
    order, partner = match(x[:, 1:], 1, 1)
    np.testing.assert_array_equal(order, np.tile([1, 5, 7, 9, 11, 13, *range(0, 15, 2), 3], (2, 1)))
    np.testing.assert_array_equal(partner, np.full((2, 1), 6 + 3))


def test_log_size_repeats_a_key():
    """Attention with log s is that of the key s times; padding is not seen."""
    query, key, value = draw(0, 3, 1, 4, 2, 8)
    size = np.array([[1.0, 3.0, 1.0, 2.0]], np.float32)
    tokens = grid_of(np.zeros((1, 4, 1), np.float32), (2, 2), 0).replace(size=size)
    counted = attend(query, key, value, key_bias(tokens)[:, None, None])
    repeats = np.array([0, 1, 1, 1, 2, 3, 3])
    repeated = attend(query, key[:, repeats], value[:, repeats], None)
    np.testing.assert_allclose(counted, repeated, atol=1e-6)
    masked = tokens.replace(size=None, valid=np.array([[True, False, True, False]]))
    seen = attend(query, key, value, key_bias(masked)[:, None, None])
    np.testing.assert_allclose(seen, attend(query, key[:, ::2], value[:, ::2], None), atol=1e-6)
    both = key_bias(masked.replace(size=size))
    np.testing.assert_allclose(both, [[0, MASKED, 0, MASKED]])
    assert tokens.replace(proportional=False).key_bias() is None


def test_proportional_attention_changes_the_output():
    """TOME-9, and 'mean_size_weighted' pools otherwise than the plain mean."""
    fields = {"width": 8, "depth": 3, "heads": 2, "patch": 4, "image_size": 16, "num_classes": 3}
    images, outputs = draw(0, 1, 16, 16, 3), []
    for proportional, pool in ((True, "mean_patches"), (False, "mean_size_weighted")):
        options = {"proportional": proportional}
        reduction = {"name": "tome", "rate": 3, "fusion": "none", "options": options}
        model = models.create(fields | {"reduction": reduction, "pool": pool})
        outputs.append(on_host(model.apply)({"params": random_params(model)}, images)[1])
    counted, plain = outputs
    np.testing.assert_allclose(plain["features"][0], counted["features"][0], atol=1e-6)
    assert np.abs(plain["features"][1] - counted["features"][1]).max() > 1e-3
    patches = plain["features"][-1][:, 1:]
    size = (plain["group"].reshape(-1)[:, None] == np.arange(patches.shape[1])).sum(0)
    np.testing.assert_allclose(
        plain["pooled"], (patches * size[:, None]).sum(1) / size.sum(), atol=1e-5
    )
    assert np.abs(plain["pooled"] - patches.mean(1)).max() > 1e-3


def test_a_key_of_zeros_attracts_nothing():
    metric = draw(0, 2, PATCHES, WIDTH)
    metric[:, :2] = 0
    order, partner = match(metric, 3, PREFIX)
    assert not (partner == 4).any()  # the first odd token, after the four that stay
    assert not (order[:, -3:] == 1).any()


def test_the_cap_is_told_with_block_and_rate():
    def create(rate, schedule="per_block", **fields):
        reduction = {"name": "tome", "rate": rate, "schedule": schedule, "fusion": "none"}
        return models.create(
            {"variant": "l", "image_size": 224, "num_classes": 10, "reduction": reduction} | fields
        )

    # CLS is counted: 188 ... 20, 12, the counts of every other method.
    assert create(8).schedule.tokens(196, 1)[-2:] == (20, 12)
    message = "block 18 'tome' can remove at most 47 of 95 patch tokens, not 50.* rate .* is 48"
    with pytest.raises(ScheduleError, match=message):
        create(50, "three_stage")
    assert create(48, "three_stage").schedule.removed == 145
    with pytest.raises(ConfigError, match="'tome' merges tokens instead of pruning them"):
        models.create(
            {
                "variant": "ti",
                "image_size": 64,
                "num_classes": 2,
                "reduction": {"name": "tome", "rate": 1, "fusion": "llf"},
            }
        )
