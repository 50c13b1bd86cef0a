"""Masks, layer-wise decay, freezing, clipping and averaging."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import fixture_names, load_fixture, random_params
from state_dicts import cropr_names

from cropr_jax import models
from cropr_jax.core.trees import flatten
from cropr_jax.errors import ConfigError
from cropr_jax.reducers.registry import REDUCERS
from cropr_jax.train import optimizer
from cropr_jax.train.learning_rate import WarmupCosine
from cropr_jax.train.optimizer import adamw, layer_multipliers, match
from cropr_jax.train.state import (
    TrainState,
    create_state,
    evaluation_params,
    merge,
    split,
    update_ema,
)


def tiny(**kwargs):
    reduction = kwargs.pop("reduction", {"name": "cropr", "rate": 2, "fusion": "llf"})
    return models.create(
        {
            "width": 8,
            "depth": 4,
            "heads": 2,
            "patch": 4,
            "image_size": 16,
            "num_classes": 3,
            "reduction": reduction,
            **kwargs,
        }
    )


def names_of(model):
    return list(flatten(models.abstract_params(model)))


def variants():
    for name in ("none", *REDUCERS):
        yield tiny(reduction={"name": name, "rate": 2, "fusion": "none"})
    options = {"heads": 2, "projections": True, "pre_norm": True}
    yield tiny(reduction={"name": "cropr", "rate": 2, "fusion": "llf", "options": options})
    yield tiny(pool="cls", layer_scale=1e-5)
    yield tiny(prefix=0, pool="mean_patches")
    yield tiny(name="eva02", layer_scale=1e-5)


@pytest.mark.slow
def test_rules_cover_every_variant():
    for model in variants():
        names = names_of(model)
        decay = match(names, optimizer.WEIGHT_DECAY, "weight decay")
        assert set(decay) == set(names)
        for name, value in decay.items():
            last = name.rsplit("/", 1)[-1]
            assert value == (last in ("kernel", "queries", "query", "centres")), name


def test_attention_biases_of_rank_two_are_not_decayed():
    params = flatten(models.abstract_params(tiny()))
    name = "block_0/attn/query/bias"
    assert len(params[name].shape) == 2
    assert match([name], optimizer.WEIGHT_DECAY, "weight decay") == {name: 0.0}


def test_uncovered_parameter_is_named():
    with pytest.raises(ConfigError, match="weight decay of parameter 'block_0/new'"):
        match(["head/bias", "block_0/new"], optimizer.WEIGHT_DECAY, "weight decay")


def test_first_match_wins():
    assert match(["a/b"], [("a/.*", 1), (".*", 2)], "x") == {"a/b": 1}


def test_layer_multipliers_of_vit_l():
    names = [
        "cls",
        "pos_embed",
        "patch_embed/kernel",
        "block_0/norm1/scale",
        "block_1/mlp/fc1/bias",
        "block_10/norm1/scale",
        "block_23/attn/out/kernel",
        "fc_norm/scale",
        "head/kernel",
        "norm/bias",
        "reducer_0/scorer/queries",
        "reducer_21/auxiliary_head/linear/kernel",
    ]
    got = layer_multipliers(names, 24, 0.75)
    power = {
        "cls": 25,
        "pos_embed": 25,
        "patch_embed/kernel": 25,
        "block_0/norm1/scale": 24,
        "block_1/mlp/fc1/bias": 23,
        "block_10/norm1/scale": 14,
        "block_23/attn/out/kernel": 1,
    }
    assert got == {name: 0.75 ** power.get(name, 0) for name in names}


def test_layer_multipliers_name_a_block_too_many():
    with pytest.raises(ConfigError, match="block_4/norm1/scale"):
        layer_multipliers(["block_4/norm1/scale"], 4, 0.5)


def test_depth_is_read_off_the_names():
    assert optimizer.depth_of(names_of(tiny())) == 4


def test_adamw_by_hand():
    """Two steps of torch's AdamW in NumPy, with layer factors and a rate that changes."""
    params = {
        "block_0/mlp/fc1/kernel": np.array([[1.0, -2.0]], np.float32),
        "head/bias": np.array([3.0], np.float32),
    }
    rates = (0.1, 0.05)
    made = adamw(
        tuple(params), 1, lambda step: jnp.asarray(rates)[step], weight_decay=0.2, layer_decay=0.5
    )
    expected = {name: np.asarray(value, np.float64) for name, value in params.items()}
    moments = {name: (np.zeros_like(v), np.zeros_like(v)) for name, v in expected.items()}
    state = jax.jit(made.init)(params)
    update = jax.jit(made.update)
    for t, rate in enumerate(rates, start=1):
        grads = {name: value * np.float32(0.3 * t) for name, value in params.items()}
        for name, (m, v) in moments.items():
            g = np.asarray(grads[name], np.float64)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            moments[name] = m, v
            lr = rate * (0.5 if name.startswith("block_0") else 1.0)
            wd = 0.2 if name.endswith("kernel") else 0.0
            adam = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
            expected[name] = expected[name] * (1 - lr * wd) - lr * adam
        updates, state = jax.device_get(update(grads, state, params))
        params = {name: params[name] + updates[name] for name in params}
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-5)


def test_clipping():
    made = adamw(
        ("head/bias",), 0, lambda step: jnp.ones(()), clip_norm=1.0, betas=(0.0, 0.0), eps=1.0
    )
    params = {"head/bias": np.zeros(2, np.float32)}
    grads = {"head/bias": np.array([3.0, 4.0], np.float32)}
    updates, _ = jax.jit(lambda g, p: made.update(g, made.init(p), p))(grads, params)
    np.testing.assert_allclose(updates["head/bias"], [-0.6 / 1.6, -0.8 / 1.8], rtol=1e-6)


def test_the_learning_rate_is_compiled_once():
    """And not once more in the update of every parameter, where XLA for CPU would fuse it in."""
    params = {f"block_{i}/mlp/fc1/kernel": jnp.ones((4, i + 1)) for i in range(3)}
    made = adamw(tuple(params), 3, WarmupCosine(1e-3, 1e-6, 2, 10))
    step = jax.jit(lambda grads, state: made.update(grads, state, params)[0])
    state = jax.eval_shape(made.init, params)
    assert step.lower(params, state).compile().as_text().count(" cosine(") == 1


def test_frozen_parameters_have_no_state():
    params = random_params(tiny())
    names = list(flatten(params))
    freeze = (r"block_\d+/.*", "cls|pos_embed", "patch_embed/.*")
    trainable = optimizer.trainable(names, freeze)
    assert trainable and all(n.startswith(("fc_norm", "head", "reducer_")) for n in trainable)
    made = adamw(trainable, 4, lambda step: 0.1)
    state = create_state(params, made, trainable, ema=True)
    held = split(params, trainable)[0]
    size = sum(leaf.size for leaf in held.values())
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * size
    assert set(state.ema) == set(trainable)


def test_freezing_nothing_or_everything_is_a_mistake():
    with pytest.raises(ConfigError, match="'blok.*' matches no parameter"):
        optimizer.trainable(["head/bias", "cls"], ("blok.*",))
    with pytest.raises(ConfigError, match="leaves no parameter"):
        optimizer.trainable(["head/bias"], (".*",))


def test_split_and_merge():
    params = random_params(tiny())
    chosen, frozen = split(params, ["cls", "head/bias"])
    assert set(chosen) == {"cls", "head/bias"}
    again = merge(chosen, frozen)
    assert jax.tree.structure(again) == jax.tree.structure(params)


def test_average_of_parameters():
    state = TrainState(
        jnp.array(1),
        {"head": {"bias": jnp.array([2.0]), "kernel": jnp.array([5.0])}},
        (),
        {"head/bias": jnp.array([1.0])},
    )
    ema = update_ema(state.ema, {"head/bias": jnp.array([2.0])}, 0.75)
    np.testing.assert_allclose(ema["head/bias"], [1.25])
    evaluated = evaluation_params(state)["head"]
    assert (float(evaluated["bias"][0]), float(evaluated["kernel"][0])) == (1.0, 5.0)
    assert update_ema(None, {}, None) is None


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("optim_segm"))
def test_released_groups_of_segmentation(name):
    """Decay and layer of every parameter; drop path of every block."""
    meta = load_fixture(name)[1]
    kwargs, cropr = meta["model_kwargs"], meta["cropr_cfg"]
    patches = (kwargs["img_size"] // kwargs["patch_size"]) ** 2
    model = models.create({
        "name": "eva02", "head": "segmentation", "width": kwargs["embed_dim"],
        "depth": kwargs["depth"], "heads": kwargs["num_heads"], "patch": kwargs["patch_size"],
        "image_size": kwargs["img_size"], "num_classes": kwargs["num_classes"],
        "drop_path": kwargs["drop_path_rate"],
        # More than there are patches: the released module is made without a look at them.
        "reduction": {"name": "cropr", "rate": min(cropr["pruning_rate"], patches // 8)},
    })  # fmt: skip
    rates = meta["drop_path_by_block"]
    np.testing.assert_allclose(model.drop_rates(), rates, rtol=1e-6)

    flat = flatten(models.abstract_params(model))
    names = list(flat)
    # Each parameter filled with its own number, to be known again under its released name.
    marked = {k: np.full(leaf.shape, i, np.float32) for i, (k, leaf) in enumerate(flat.items())}
    ours = {theirs: names[int(x.flat[0])] for theirs, x in cropr_names(marked).items()}
    groups = meta["param_groups"]
    assert ours.keys() == groups.keys()
    scales = {group["lr_scale"] for group in groups.values()}
    multipliers = layer_multipliers(names, model.depth, max(scales - {1.0}))
    decayed = match(names, optimizer.WEIGHT_DECAY, "weight decay")
    weight_decay = max(group["weight_decay"] for group in groups.values())
    for theirs, group in groups.items():
        assert multipliers[ours[theirs]] == pytest.approx(group["lr_scale"]), theirs
        assert decayed[ours[theirs]] * weight_decay == group["weight_decay"], theirs
