"""The step: parity with the released code, accumulation, sharding, collectives, stop-gradient."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_config
from conftest import fixture_names, load_fixture, random_params
from training import assert_close, make_step, mesh_of, start

from cropr_jax import models
from cropr_jax.convert.timm import params_from_state_dict
from cropr_jax.core import rng
from cropr_jax.core.trees import flatten
from cropr_jax.tasks.classification.task import Classification, cross_entropy
from cropr_jax.train import optimizer, routers, sharding
from cropr_jax.train.learning_rate import WarmupCosine
from cropr_jax.train.state import create_state, split
from cropr_jax.train.step import MODEL_KEY, Step, jit_train, run_key

POOLS = {"avg": "mean_all", "token": "cls"}
BATCH = 16


def tiny_model(**kwargs):
    config = tiny_config.get_config().model.to_dict()
    return models.create({**config, "depth": 3, **kwargs})


def make_batch(model, size=BATCH):
    draw = np.random.default_rng(0)
    return {
        "image": draw.normal(size=(size, *model.image_size, 3)).astype(np.float32),
        "label": draw.integers(0, model.num_classes, size).astype(np.int32),
        "id": np.arange(100, 100 + size, dtype=np.int32),
    }


def run(step, steps=2):
    """State and metrics after some steps on one batch, placed on the step's mesh."""
    state = start(step)
    shardings = sharding.state_shardings(state, step.mesh)
    state = jax.device_put(state, shardings)
    batch = sharding.place(make_batch(step.model), step.mesh)
    compiled = jit_train(step, shardings).lower(state, batch, run_key(0)).compile()
    for _ in range(steps):
        state, metrics = compiled(state, batch, run_key(0))
    return jax.device_get(state), jax.device_get(metrics), compiled.as_text()


@pytest.fixture(scope="module")
def whole():
    """Two steps on one device, the measure of all others."""
    return run(make_step(tiny_model(drop_path=0.2), mesh_of(1, 1)))


def collectives(text):
    """Kind and first shape of every collective in compiled text."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= \(?(\w+\[[\d,]*\]).*? ({kinds})(?:-start)?\(", text)
    return [(kind, shape) for shape, kind in found]


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("train_steps_cls"))
def test_six_steps_of_the_released_code(name):
    arrays, meta = load_fixture(name)
    config, kwargs, cropr = (
        meta["config"],
        meta["config"]["kwargs"],
        meta["config"]["cropr_cfg"],
    )
    model = models.create({
        "image_size": kwargs["img_size"], "patch": kwargs["patch_size"],
        "width": kwargs["embed_dim"], "depth": kwargs["depth"], "heads": kwargs["num_heads"],
        "num_classes": kwargs["num_classes"], "pool": POOLS[kwargs["global_pool"]],
        "num_queries": cropr["num_queries"],
        "reduction": {
            "name": "cropr", "rate": cropr["pruning_rate"],
            "fusion": "llf" if cropr["llf"] else "none",
            "options": {"heads": cropr["num_heads"], "projections": cropr["k_proj"],
                        "pre_norm": cropr["pre_attn_norm"], "mlp": cropr["mlp"]},
        },
    })  # fmt: skip
    weights = {k[2:]: v for k, v in arrays.items() if k.startswith("w/")}
    params = jax.tree.map(jnp.asarray, params_from_state_dict(weights, model))
    args = config["lr_schedule_args"]
    schedule = WarmupCosine.from_epochs(
        args["base_value"], args["final_value"], args["niter_per_ep"], args["epochs"],
        args["warmup_epochs"],
    )  # fmt: skip
    names = tuple(flatten(params))
    made = optimizer.adamw(
        names, model.depth, schedule, weight_decay=config["weight_decay"],
        layer_decay=config["layer_decay"], clip_norm=config["clip_grad_norm"],
    )  # fmt: skip
    step = Step(model, Classification(), made, schedule, names, 1, None, mesh_of(1, 1))

    @jax.jit
    def one(params, opt_state, count, images, targets):
        ids = jnp.arange(len(images))
        batch = {"inputs": {"image": images}, "targets": targets, "id": ids}
        grads, metrics = step.gradients(params, {}, None, batch, count, run_key(0))
        updates, opt_state = made.update(grads, opt_state, params)
        params = jax.tree.map(jnp.add, params, updates)
        return params, opt_state, metrics, norm_of(grads)

    flat = flatten(params)
    state = made.init(flat)
    for i in range(config["steps"]):
        images = arrays["in/x"][i].transpose(0, 2, 3, 1)
        flat, state, metrics, norm = one(flat, state, i, images, arrays["in/soft_labels"][i])
        np.testing.assert_allclose(metrics["loss"], arrays["out/losses"][i].sum(), atol=1e-4)
        np.testing.assert_allclose(metrics["main_loss"], arrays["out/losses"][i][0], atol=1e-4)
        np.testing.assert_allclose(norm, arrays["out/grad_norm"][i], rtol=1e-4)
    after = {k[len("out/after/") :]: v for k, v in arrays.items() if k.startswith("out/after/")}
    for key, value in flatten(params_from_state_dict(after, model)).items():
        if not key.endswith("attn/key/bias"):
            np.testing.assert_allclose(flat[key], value, atol=2e-4, err_msg=key)


def norm_of(grads):
    return jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in grads.values()))


@pytest.mark.slow
def test_accumulation_equals_the_big_batch(whole):
    state, metrics, _ = whole
    model = tiny_model(drop_path=0.2)
    parts, parts_metrics, _ = run(make_step(model, mesh_of(1, 1), accum_steps=4))
    assert_close(parts, state, atol=1e-4)
    for name, value in metrics.items():
        np.testing.assert_allclose(parts_metrics[name], value, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "fsdp", "accum"), [(8, 1, 2), (2, 4, 1)])
def test_sharded_equals_unsharded(whole, data, fsdp, accum):
    state, metrics, _ = whole
    model = tiny_model(drop_path=0.2)
    cut, cut_metrics, text = run(make_step(model, mesh_of(data, fsdp), accum_steps=accum))
    assert_close(cut, state, atol=1e-4)
    for name, value in metrics.items():
        np.testing.assert_allclose(cut_metrics[name], value, rtol=1e-4)
    kinds = [kind for kind, _ in collectives(text)]
    # Mixup with one group over all devices: one exchange, whatever the mesh.
    assert kinds.count("collective-permute") <= 1
    assert "all-to-all" not in kinds
    assert "all-reduce" in kinds
    if fsdp == 1:
        assert set(kinds) <= {"all-reduce", "collective-permute"}
    else:
        shapes = {tuple(leaf.shape) for leaf in jax.tree.leaves(state.params)}
        for kind, shape in collectives(text):
            if kind == "all-gather":
                assert shape_of(shape) in shapes, shape


def shape_of(text):
    """`f32[4,8]{1,0}` -> (4, 8)."""
    return tuple(int(n) for n in re.match(r"\w+\[([\d,]*)\]", text)[1].split(",") if n)


def test_forward_pass_of_a_data_mesh_communicates_nothing():
    mesh = mesh_of(8, 1)
    model = tiny_model(drop_path=0.2)
    place = sharding.batch_sharding(mesh)
    batch = make_batch(model)

    def forward(params, images, ids):
        keys = rng.example_keys(jax.random.key(0), 0, ids)
        logits, out = model.apply({"params": params}, images, train=True, keys=keys)
        return logits, out["auxiliary"], out["kept"]

    params = random_params(model)
    lowered = jax.jit(
        forward, in_shardings=(sharding.replicated(mesh), place, place), out_shardings=place
    ).lower(params, batch["image"], batch["id"])
    assert collectives(lowered.compile().as_text()) == []


def test_auxiliary_losses_do_not_reach_the_backbone():
    model = tiny_model(depth=4)
    params = random_params(model)
    batch = jax.tree.map(jnp.asarray, make_batch(model, 4))
    targets = jax.nn.one_hot(batch["label"], model.num_classes)
    sites = len(model.schedule.sites)

    def loss(params, site):
        keys = rng.example_keys(jax.random.key(0), 0, batch["id"])
        _, out = model.apply({"params": params}, batch["image"], train=True, keys=keys)
        every = jnp.stack([
            cross_entropy(logits, targets[:, None]).mean()
            for logits in out["auxiliary"]
        ])  # fmt: skip
        return every[site]

    gradient = jax.jit(jax.grad(loss))
    for site in range(sites):
        grads = flatten(gradient(params, site))
        own = f"reducer_{site}/"
        for name, value in grads.items():
            if name.startswith(own):
                continue
            assert not np.asarray(value).any(), f"site {site} reaches {name}"
        assert np.asarray(grads[own + "scorer/queries"]).any()


def router_step(from_model=False):
    reduction = {"name": "cropr", "rate": 3, "fusion": "none"}
    model = tiny_model(depth=4, drop_path=0.0, reduction=reduction)
    teacher = models.unpruned(model) if from_model else None
    step = make_step(
        model,
        mesh_of(1, 1),
        freeze=(routers.BACKBONE,),
        teacher=teacher,
        task=Classification(),  # which mixes nothing
    )
    return dataclasses.replace(step, from_model=from_model)


@pytest.mark.slow
@pytest.mark.parametrize("from_model", [False, True])
def test_routers_leave_the_backbone_bit_by_bit(from_model):
    """And take their targets from the labels or from the model itself, whose parameters are held
    once."""
    step = router_step(from_model)
    state = start(step)
    before = flatten(jax.device_get(state.params))
    after, metrics, _ = run(step, steps=1)
    for name, value in flatten(after.params).items():
        assert (value != before[name]).any() == name.startswith("reducer_"), name
    assert after.teacher is None
    batch = jax.tree.map(jnp.asarray, make_batch(step.model))

    @jax.jit
    def expected(params):
        keys = rng.example_keys(jax.random.fold_in(run_key(0), MODEL_KEY), 0, batch["id"])
        _, out = step.model.apply({"params": params}, batch["image"], train=True, keys=keys)
        targets = jax.nn.one_hot(batch["label"], step.model.num_classes)
        if from_model:
            whole = {k: v for k, v in params.items() if not k.startswith("reducer_")}
            unpruned = models.unpruned(step.model)
            targets = jax.nn.softmax(unpruned.apply({"params": whole}, batch["image"])[0])
        each = [(targets * jax.nn.log_softmax(x[:, 0])).sum(-1) for x in out["auxiliary"]]
        return -jnp.stack(each).mean()

    np.testing.assert_allclose(metrics["auxiliary_loss"], expected(state.params), rtol=1e-4)


@pytest.mark.slow
def test_routers_cost_no_backward_pass():
    """By FLOPs: a step of all parameters is three passes, one of the routers a single one.

    The unpruned model adds one more, forward only, of more tokens.
    """

    def flops(step):
        state = jax.eval_shape(lambda: start(step))
        compiled = jit_train(step, sharding.state_shardings(state, step.mesh))
        lowered = compiled.lower(state, make_batch(step.model), run_key(0))
        return lowered.cost_analysis()["flops"]

    alone, taught = router_step(), router_step(True)
    full = flops(make_step(alone.model, alone.mesh))
    assert flops(alone) < 0.4 * full
    assert flops(taught) < 0.9 * full


def distilled(**kwargs):
    reduction = {"name": "sit", "rate": 3, "fusion": "none", "options": {"distill": True}}
    model = tiny_model(reduction=reduction, drop_path=0.2)
    return make_step(model, teacher=models.unpruned(model), **kwargs)


@pytest.mark.slow
def test_teacher_teaches_and_stays():
    """Cut over devices or not: the same losses, no gradient into it, and it comes out as it was."""
    found = {}
    for shape in ((1, 1), (2, 4)):
        step = distilled(mesh=mesh_of(*shape))
        params = random_params(step.model, 5)
        taught = random_params(step.teacher, 6)
        state = create_state(params, step.optimizer, step.trainable, False, taught)
        shardings = sharding.state_shardings(state, step.mesh)
        place = flatten(shardings.teacher)["block_0/mlp/fc1/kernel"]
        assert (place.spec == jax.P()) == (shape == (1, 1))
        before = jax.device_get(flatten(taught))
        batch = sharding.place(make_batch(step.model), step.mesh)
        state = jax.device_put(state, shardings)
        state, metrics = jit_train(step, shardings)(state, batch, run_key(0))
        found[shape] = jax.device_get(metrics)
        for name, leaf in flatten(state.teacher).items():
            np.testing.assert_array_equal(leaf, before[name])
        moments = state.opt_state[1 if len(state.opt_state) > 4 else 0]
        assert moments.mu.keys() == flatten(params).keys()
    one, other = found.values()
    assert one["distill_logits"] > 0 and one["distill_tokens"] > 0
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-3, err_msg=name)
    parts = one["main_loss"] + one["distill_logits"] + one["distill_tokens"]
    np.testing.assert_allclose(one["loss"], parts, rtol=1e-5)


@pytest.mark.slow
def test_no_gradient_reaches_the_teacher():
    step = distilled(mesh=mesh_of(1, 1))
    model = step.model
    params = random_params(model, 5)
    chosen, frozen = split(params, step.trainable)
    made = make_batch(model, 2)
    targets = np.full((2, model.num_classes), 1 / model.num_classes, np.float32)
    batch = {"inputs": {"image": made["image"]}, "targets": targets, "id": made["id"]}
    loss = jax.jit(jax.grad(step.loss, argnums=(0, 2), has_aux=True))
    theirs = random_params(step.teacher, 6)
    (student, taught), _ = loss(chosen, frozen, theirs, batch, 0, run_key(0))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(taught))
    assert np.any(student["reducer_0/reverse/block_0/fc1/kernel"])
    assert np.any(student["block_0/mlp/fc1/kernel"])
