"""A run's parts: batches on their way, and evaluations that count every example once."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_config
from conftest import random_params

from cropr_jax.core.schedule import Schedule
from cropr_jax.tasks import Result
from cropr_jax.tasks.classification.task import Classification
from cropr_jax.train import recipe, sharding
from cropr_jax.train import run as running
from cropr_jax.train.run import Evaluation, Run, prefetch
from cropr_jax.train.step import run_key


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_so_many_batches_are_on_their_way(ahead):
    """No more than that, since each takes room on the devices."""
    mesh, read = sharding.make_mesh(), []

    def batches():
        for i in range(6):
            read.append(i)
            yield {"x": np.full(8, i)}

    stream = prefetch(batches(), mesh, ahead=ahead)
    assert read == []
    found = []
    for i, batch in enumerate(stream):
        found.append(int(batch["x"][0]))
        assert len(read) == min(i + ahead, 6)
    assert found == list(range(6))


def test_batches_lie_on_all_devices():
    mesh = sharding.make_mesh(fsdp=2)
    image = np.arange(16 * 3, dtype=np.float32).reshape(16, 3)
    (batch,) = prefetch([{"image": image, "id": np.arange(16)}], mesh)
    assert batch.keys() == {"image", "id"}
    np.testing.assert_array_equal(batch["image"], image)
    for leaf in batch.values():
        assert leaf.sharding == sharding.batch_sharding(mesh)
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {2}


def test_no_batches():
    assert list(prefetch([], sharding.make_mesh())) == []


def test_the_first_split_ranks():
    metrics = {"val": {"top1": 0.5}, "a": {"top1": 0.9}}
    assert Evaluation(metrics, {}).first == {"top1": 0.5}


class Recorder:
    """Evaluator that keeps what it gets; it counts the rows that are examples."""

    def __init__(self, source):
        self.ids, self.source = [], source

    def add(self, outputs):
        assert all(isinstance(value, np.ndarray) for value in outputs.values())
        self.ids.append(outputs["id"][outputs["mask"] > 0].tolist())

    def result(self):
        examples = sum(map(len, self.ids))
        per_class = {"first": {"iou": None}} if len(self.source) == 5 else {}
        return Result({"top1": 0.5, "examples": examples, "batches": len(self.ids)}, per_class)


@dataclasses.dataclass(frozen=True)
class Recorded(Classification):
    """A task whose evaluators are recorders."""

    made: list = dataclasses.field(default_factory=list)

    def evaluator(self, source):
        self.made.append(Recorder(source))
        return self.made[-1]


# Handed on as they are where nothing is compiled.
PARAMS = {"head": "kernel"}
SPLITS = {"test": "test[64:113]", "few": "test[:5]", "full": "test[:16]"}


def resolve(task=None):
    """A recipe with three splits of 49, 5 and 16 examples, and batches of 8."""
    config = tiny_config.get_config("reduction=random")
    with config.unlocked():
        config.eval_batch_size = 8
        config.data.update({"num_examples": 120, "eval": SPLITS})
    resolved = recipe.resolve(config)
    # The order of the config's file; `ConfigDict` itself sorts names.
    data = resolved.config["data"] | {"eval": SPLITS}
    training = dataclasses.replace(resolved.training, task=task or resolved.task)
    return dataclasses.replace(resolved, config=resolved.config | {"data": data}, training=training)


@pytest.fixture
def compiled(monkeypatch):
    """Instead of compiled steps: what was compiled, and with which parameters and key it ran."""
    steps, calls = [], []

    def jit(step, shardings):
        steps.append(step.model.schedule)

        def measure(params, batch, key):
            calls.append((params, jax.random.key_data(key).tolist()))
            return {"id": batch["id"], "mask": batch["mask"]}

        return measure

    monkeypatch.setattr(running, "jit_evaluate", jit)
    return steps, calls


def test_an_evaluation_sees_every_example_once_and_in_order(compiled):
    """Also what is still under way on the device when the batches end."""
    resolved = resolve(Recorded())
    found = Run(resolved).evaluate(PARAMS, resolved.model.schedule)
    ranges = {"test": range(64, 113), "few": range(5), "full": range(16)}
    assert list(found.metrics) == list(ranges)
    for recorder, ids in zip(resolved.task.made, ranges.values(), strict=True):
        assert [i for batch in recorder.ids for i in batch] == list(ids)
    assert found.metrics == {
        "test": {"top1": 0.5, "examples": 49, "batches": 7},
        "few": {"top1": 0.5, "examples": 5, "batches": 1},
        "full": {"top1": 0.5, "examples": 16, "batches": 2},
    }
    # Of splits whose evaluator has classes alone.
    assert found.per_class == {"few": {"first": {"iou": None}}}
    assert found.first == {"top1": 0.5, "examples": 49, "batches": 7}
    key = jax.random.key_data(run_key(resolved.config["seed"])).tolist()
    assert compiled[1] == [(PARAMS, key)] * 10


def test_a_schedule_is_compiled_once(compiled):
    resolved = resolve(Recorded())
    run, own = Run(resolved), resolved.model.schedule
    for pruning in (own, own, Schedule(3), own):
        run.evaluate(PARAMS, pruning)
    assert compiled[0] == [own, Schedule(3)]


@pytest.mark.parametrize(("wrong", "counted"), [(-1, 48), (7, 56)])
def test_a_wrong_count_is_no_result(compiled, monkeypatch, wrong, counted):
    """Examples that are missed, or rows that only fill a batch and are counted."""
    result = Recorder.result

    def miscounted(self):
        found = result(self)
        return found._replace(metrics={**found.metrics, "examples": counted})

    monkeypatch.setattr(Recorder, "result", miscounted)
    resolved = resolve(Recorded())
    with pytest.raises(RuntimeError, match=f"evaluation of 'test' counted {counted} of 49"):
        Run(resolved).evaluate(PARAMS, resolved.model.schedule)
    assert counted == 49 + wrong


def test_an_evaluation_is_that_of_the_model():
    """The compiled step against the model itself, image by image."""
    resolved = resolve()
    model, whole = resolved.model, Schedule(3)
    params = random_params(model)
    found = Run(resolved).evaluate(params, whole)
    source = resolved.splits.eval("test")
    labels = np.array([source[i]["label"] for i in range(len(source))])
    images = np.stack([source[i]["image"] for i in range(len(source))]).astype(np.float32)
    apply = jax.jit(model.clone(schedule=whole).apply)
    logits = np.asarray(apply({"params": params}, (images / 255 - 0.5) / 0.5)[0])
    right = int((logits.argmax(-1) == labels).sum())
    assert 0 < right < 49
    metrics = found.first
    assert metrics["top1"] == right / 49 and metrics["examples"] == 49
    # The step computes for batches of 8, which rounds otherwise.
    shifted = logits - logits.max(-1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(49), labels]
    assert metrics["loss"] == pytest.approx(losses.mean(), rel=1e-4)
    assert found.metrics["full"]["examples"] == 16 and found.per_class == {}
