"""What DynamicViT and SiT learn from a teacher: values by hand, gradients, what stays of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params

from cropr_jax import models
from cropr_jax.core import rng, schedule
from cropr_jax.core.trees import flatten
from cropr_jax.errors import ConfigError
from cropr_jax.reducers.distillation import divergence, squared_error
from cropr_jax.reducers.dynamicvit import DynamicViT
from cropr_jax.reducers.sit import SiT

DEPTH, PATCHES, COUNTS, BATCH = 4, 16, (12, 9), 2


def log_softmax(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kl(student, teacher):
    """Sum over classes of p_t (log p_t - log p_s)."""
    theirs, ours = log_softmax(teacher), log_softmax(student)
    return (np.exp(theirs) * (theirs - ours)).sum(-1)


@pytest.fixture
def draw():
    generator = np.random.default_rng(0)
    return lambda *shape: generator.normal(size=shape).astype(np.float32)


divergence, squared_error = jax.jit(divergence), jax.jit(squared_error)


def test_divergence_and_squared_error(draw):
    student, teacher = draw(3, 2, 5), draw(3, 2, 5)
    np.testing.assert_allclose(divergence(student, teacher), kl(student, teacher), rtol=1e-4)
    np.testing.assert_allclose(divergence(student, student), 0, atol=1e-6)
    # Two classes: 3 to 1 for the teacher, even for the student.
    by_hand = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    found = divergence(np.zeros(2, np.float32), np.log(np.array([3, 1], np.float32)))
    np.testing.assert_allclose(found, by_hand, rtol=1e-5)
    half = student.astype(jnp.bfloat16)
    assert divergence(half, teacher).dtype == squared_error(half, teacher).dtype == jnp.float32
    found = squared_error(np.array([[1, 2]], np.float32), np.array([[3, 2]], np.float32))
    np.testing.assert_allclose(found, [2.0])


@pytest.mark.parametrize("token_loss", ["mse", "kl"])
def test_dynamicvit_by_hand(draw, token_loss):
    """Tokens count where the last site keeps them, over the whole batch at once."""
    given = logits, taught, tokens, theirs = draw(2, 5), draw(2, 5), draw(2, 4, 3), draw(2, 4, 3)
    kept = np.array([[1, 1, 1, 0], [0, 1, 0, 0]], np.float32)
    module = DynamicViT(distill=True, distill_weight=0.25, token_loss=token_loss)

    @jax.jit
    def losses(kept, logits, taught, tokens, theirs):
        out = {"sites": ({"kept": jnp.ones((2, 4))}, {"kept": kept}), "normed": tokens}
        return module.distillation((logits, out), (taught, {"normed": theirs}))

    found = losses(kept, *given)
    square = ((tokens - theirs) ** 2).mean(-1)
    mean = (square if token_loss == "mse" else kl(tokens, theirs))[kept > 0].mean()
    np.testing.assert_allclose(found["distill_logits"], 0.25 * kl(logits, taught).mean(), rtol=1e-4)
    np.testing.assert_allclose(found["distill_tokens"], 0.25 * mean, rtol=1e-4)
    assert losses(np.zeros_like(kept), *given)["distill_tokens"] == 0
    gradient = jax.jit(jax.grad(lambda *args: losses(*args)["distill_tokens"]))
    assert not np.any(gradient(kept, *given))


def test_sit_by_hand(draw):
    """Blocks before the first site are compared as they are, the others as recovered."""
    logits, taught = draw(2, 5), draw(2, 5)
    theirs = [draw(2, 1 + 4, 3) for _ in range(3)]
    first, recovered = draw(2, 1 + 4, 3), [draw(2, 4, 3), draw(2, 4, 3)]
    out = {"features": (first, draw(2, 3, 3), draw(2, 2, 3)), "recovered": tuple(recovered)}
    module = SiT(distill=True, token_weight=3.0, logit_weight=0.5)
    found = jax.jit(module.distillation)((logits, out), (taught, {"features": tuple(theirs)}))
    pairs = zip([first[:, 1:], *recovered], theirs, strict=True)
    errors = [((ours - whole[:, 1:]) ** 2).mean() for ours, whole in pairs]
    np.testing.assert_allclose(found["distill_tokens"], 3 * np.mean(errors), rtol=1e-4)
    np.testing.assert_allclose(found["distill_logits"], 0.5 * kl(logits, taught).mean(), rtol=1e-4)


def build(name, **options):
    reduction = {"name": name, "rate": 1, "fusion": "none", "options": options}
    base = {"width": 8, "depth": DEPTH, "heads": 2, "patch": 4, "image_size": 16, "num_classes": 5}
    model = models.create(base | {"reduction": reduction, "drop_path": 0.1})
    return model.clone(schedule=schedule.to_counts(DEPTH, PATCHES, (2, 3), COUNTS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dynamicvit", "sit"])
def test_model_and_teacher(name):
    model, plain = build(name, distill=True), build(name)
    teacher = models.unpruned(model)
    assert not any(teacher.drop_rates()) and not teacher.schedule.sites
    params, theirs = random_params(model), random_params(teacher, 1)
    images = np.random.default_rng(0).normal(size=(BATCH, 16, 16, 3)).astype(np.float32)

    @jax.jit
    @jax.grad
    def gradient(params, theirs, images):
        keys = rng.example_keys(jax.random.key(1), 0, jnp.arange(BATCH))
        student = model.apply({"params": params}, images, train=True, keys=keys)
        taught = teacher.apply({"params": theirs}, images)
        found = model.distillation_losses(student, taught)
        assert found.keys() == {"distill_logits", "distill_tokens"}
        if name == "sit":
            shape = (BATCH, PATCHES, model.width)
            assert [x.shape for x in student[1]["recovered"]] == [shape] * 3
        return found["distill_tokens"]

    found = flatten(jax.device_get(gradient(params, theirs, images)))
    reached = {name for name, leaf in found.items() if np.any(leaf)}
    assert {"block_0/mlp/fc1/kernel", "patch_embed/kernel"} <= reached
    if name == "sit":
        wanted = {(0, 1), (1, 2), (1, 3)}  # site, and the blocks whose tokens are its
        assert {f"reducer_{s}/reverse/block_{b}/fc1/kernel" for s, b in wanted} <= reached
        assert "reducer_1/fc2/kernel" in reached

    # What inference needs is as without a teacher.
    slim, kept = models.slim(model, params)
    assert flatten(kept).keys() == flatten(models.abstract_params(models.slim(plain, {})[0])).keys()
    assert flatten(models.abstract_params(slim)).keys() == flatten(kept).keys()


def test_without_a_teacher_nothing_is_added():
    for name in ("dynamicvit", "sit"):
        reducer = build(name).make_reducer()
        assert not reducer.needs_teacher and "KL" not in reducer.describe_losses
        assert not any("reverse" in k for k in flatten(models.abstract_params(build(name))))


def test_options_that_cannot_work():
    with pytest.raises(ConfigError, match="token_loss: found 'l1', expected one of"):
        build("dynamicvit", token_loss="l1")
