"""Losses and exact metrics of classification, against NumPy."""

import jax
import numpy as np
import pytest

from cropr_jax.errors import ConfigError
from cropr_jax.tasks import get
from cropr_jax.tasks.classification import task as classification
from cropr_jax.tasks.classification.task import Accuracy, Classification

TASK = Classification()
accuracy_sums = jax.jit(classification.accuracy_sums)


def test_loss_is_the_plain_sum():
    draw = np.random.default_rng(0)
    logits, sites = draw.normal(size=(4, 5)), draw.normal(size=(2, 4, 3, 5))
    targets = draw.dirichlet(np.ones(5), 4)

    def cross_entropy(x, t):
        p = np.exp(x - x.max(-1, keepdims=True))
        return -(t * np.log(p / p.sum(-1, keepdims=True))).sum(-1).mean()

    parts = [cross_entropy(site, targets[:, None]) for site in sites]

    @jax.jit
    def compute(logits, sites, targets):
        extra = {str(i): TASK.criterion(site, None, targets) for i, site in enumerate(sites)}
        return TASK.losses(logits, extra, targets), TASK.losses(logits, {}, targets)

    (total, metrics), (_, unpruned) = compute(logits, list(sites), targets)
    np.testing.assert_allclose(total, cross_entropy(logits, targets) + sum(parts), rtol=1e-5)
    np.testing.assert_allclose(metrics["auxiliary_loss"], np.mean(parts), rtol=1e-5)
    assert set(unpruned) == {"main_loss"}


def test_ranks_of_ties_and_broken_rows():
    nan = np.nan
    logits = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [nan, 0.0, 1.0], [3.0, 2.0, 1.0]])
    ranks = jax.jit(classification.rank_of_label)(logits, np.array([0, 1, 2, 2]))
    assert ranks.tolist() == [0, 1, 3, 2]


@pytest.mark.parametrize("size", [1, 3, 7, 23])
def test_sums_are_exact_whatever_the_batches(size):
    draw = np.random.default_rng(1)
    logits = draw.normal(size=(23, 11)).astype(np.float32)
    labels = draw.integers(0, 11, 23)
    order = np.argsort(-logits, axis=1)
    evaluator = Accuracy()
    for start in range(0, 23, size):
        count = min(size, 23 - start)
        pad = ((0, size - count), (0, 0))
        evaluator.add(accuracy_sums(
            np.pad(logits[start:start + size], pad, constant_values=np.inf),
            {
                "label": np.pad(labels[start:start + size], pad[0]),
                "mask": (np.arange(size) < count).astype(np.float32),
            },
        ))  # fmt: skip
    got, per_class = evaluator.result()
    assert got["examples"] == 23 and not per_class
    assert got["top1"] == (order[:, 0] == labels).sum() / 23
    assert got["top5"] == (order[:, :5] == labels[:, None]).any(1).sum() / 23
    assert np.isfinite(got["loss"])


def test_few_classes_are_all_within_five():
    sums = accuracy_sums(np.array([[0.0, 1.0]]), {"label": np.array([0]), "mask": np.array([1.0])})
    assert (int(sums["top1"]), int(sums["top5"])) == (0, 1)


def test_nothing_to_evaluate():
    with pytest.raises(ValueError, match="no example"):
        Accuracy().result()


def test_unknown_task():
    with pytest.raises(ConfigError, match="config.task: found 'x'"):
        get("x")
