"""Batches: pure functions of (seed, step), hosts and workers change nothing; evaluation."""

import dataclasses
import itertools
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cropr_jax import tasks
from cropr_jax.data import pipeline
from cropr_jax.data.open import Splits, open_source
from cropr_jax.data.records import CLASS, Examples, Source
from cropr_jax.errors import ConfigError, ExampleError, WorkerError

ROOT = Path(__file__).resolve().parents[2]


def config(**changes):
    base = {
        "task": "classification",
        "seed": 3,
        "batch_size": 8,
        "eval_batch_size": 8,
        "data": {
            "source": "fake",
            "num_examples": 30,
            "image_size": (12, 10),
            "num_classes": 5,
            "train": "train",
            "eval": {"test": "test", "few": "test[:5]"},
            "workers": 0,
        },
        "preprocess": {
            "res": (8, 8),
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "interpolation": "bicubic",
            "crop_ratio": 0.875,
            "train": {
                "crop_scale": (0.08, 1.0),
                "flip": True,
                "rand_augment": "rand-m9-mstd0.5-inc1",
                "erase": 0.5,
            },
        },
    }
    base["data"].update(changes.pop("data", {}))
    return {**base, **changes}


def maps(**changes):
    """The same with maps for labels."""
    data = {"source": "fake_segmentation", **changes.pop("data", {})}
    preprocess = {
        "res": (8, 12),
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "train": {
            "resize_base": (16, 12),
            "ratio_range": (0.5, 2.0),
            "cat_max_ratio": 0.75,
            "flip": True,
            "photometric": True,
        },
    }
    return config(task="segmentation", preprocess=preprocess, data=data, **changes)


def examples(config, name=""):
    """Of the training split, or of the evaluation split called `name`."""
    task, splits = tasks.create(config), Splits(config["data"])
    if name:
        return task.evaluation(config["preprocess"], splits.eval(name))
    return task.training(config["preprocess"], splits.train)


def train(config, *args, **kwargs):
    return pipeline.train_batches(config, examples(config), *args, **kwargs)


def evaluate(config, name, *args):
    return pipeline.eval_batches(config, examples(config, name), *args)


def take(batches, count):
    result = list(itertools.islice(batches, count))
    batches.close()
    return result


def assert_equal(left, right):
    assert len(left) == len(right)
    for one, two in zip(left, right, strict=True):
        assert one.keys() == two.keys()
        for key in one:
            assert one[key].dtype == two[key].dtype
            np.testing.assert_array_equal(one[key], two[key])


def test_types_and_shapes():
    (batch,) = take(train(config()), 1)
    assert {key: (value.shape, str(value.dtype)) for key, value in batch.items()} == {
        "image": ((8, 8, 8, 3), "float32"),
        "label": ((8,), "int32"),
        "id": ((8,), "int32"),
    }
    np.testing.assert_array_equal(batch["label"], batch["id"] % 5)


def test_types_and_shapes_of_maps():
    (batch,) = take(train(maps()), 1)
    assert {key: (value.shape, str(value.dtype)) for key, value in batch.items()} == {
        "image": ((8, 8, 12, 3), "float32"),
        "label": ((8, 8, 12), "uint8"),
        "id": ((8,), "int32"),
    }
    assert set(np.unique(batch["label"])) <= {0, 1, 2, 3, 4, 255}
    (batch,) = take(evaluate(maps(), "few"), 1)
    assert {key: (value.shape, str(value.dtype)) for key, value in batch.items()} == {
        "image": ((8, 1, 8, 12, 3), "float32"),
        "corner": ((8, 1, 2), "int32"),
        "resized": ((8, 2), "int32"),
        "label": ((8, 12, 10), "uint8"),
        "size": ((8, 2), "int32"),
        "id": ((8,), "int32"),
        "mask": ((8,), "float32"),
    }
    # Example 4 is 11 x 10 pixels: 8 / 11 makes it 8 x 7.
    assert batch["size"][4].tolist() == [11, 10] and batch["resized"][4].tolist() == [8, 7]
    reader = open_source(maps()["data"], "test")
    for row in range(5):
        height, width = batch["size"][row]
        np.testing.assert_array_equal(batch["label"][row, :height, :width], reader[row]["label"])
        assert (batch["label"][row, height:] == 255).all()
        assert (batch["label"][row, :, width:] == 255).all()
    assert (batch["label"][5:] == 255).all() and (batch["image"][5:] == 0).all()
    assert (batch["size"][5:] == 1).all() and (batch["resized"][5:] == 1).all()


def test_data_and_task_must_agree():
    with pytest.raises(ConfigError, match="labels are maps, .*'classification', .*one class"):
        examples(maps() | {"task": "classification"})
    with pytest.raises(ConfigError, match="one class an image, .*'segmentation', .*maps"):
        examples(maps(data={"source": "fake"}), "test")
    with pytest.raises(ConfigError, match=r"config\.task: found 'detection'"):
        examples(config(task="detection"))


@pytest.mark.parametrize("make", [config, maps])
def test_batch_depends_on_seed_and_step_alone(make):
    first = take(train(make()), 9)
    assert_equal(first, take(train(make()), 9))
    other = take(train(make(seed=4)), 1)[0]
    assert (other["id"] != first[0]["id"]).any()
    # The same example is augmented otherwise in another epoch.
    seen = {}
    for batch in first:
        for number, image in zip(batch["id"], batch["image"], strict=True):
            assert number not in seen or (seen[number] != image).any()
            seen[number] = image


@pytest.mark.parametrize("make", [config, maps])
@pytest.mark.parametrize("start", [1, 4, 7])
def test_resumed_equals_the_tail(start, make):
    whole = take(train(make()), 9)
    assert_equal(take(train(make(), start_step=start), 9 - start), whole[start:])


def test_stop_step_ends_the_iterator():
    assert len(list(train(config(), start_step=2, stop_step=5))) == 3


def test_an_epoch_holds_no_example_twice_and_the_next_is_in_another_order():
    assert pipeline.steps_per_epoch(30, config()) == 3
    batches = take(train(config()), 6)
    epochs = [np.concatenate([b["id"] for b in batches[i : i + 3]]) for i in (0, 3)]
    for ids in epochs:
        assert len(set(ids)) == 24 and set(ids) <= set(range(30))
    assert (epochs[0] != epochs[1]).any()


@pytest.mark.parametrize("make", [config, maps])
@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_together_make_the_global_batch(hosts, make):
    whole = take(train(make()), 5)
    shares = [take(train(make(), 0, h, hosts), 5) for h in range(hosts)]
    joined = [
        {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        for parts in zip(*shares, strict=True)
    ]
    assert_equal(joined, whole)


@pytest.mark.slow
def test_workers_change_nothing():
    setting = config(batch_size=24, data={"num_examples": 64})
    inline = list(train(setting, 1, stop_step=4))
    with_workers = config(batch_size=24, data={"num_examples": 64, "workers": 2})
    assert_equal(list(train(with_workers, 1, stop_step=4)), inline)
    assert_equal(
        list(evaluate(with_workers, "test")),
        list(evaluate(setting, "test")),
    )


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed():
    program = f"""
import multiprocessing, time
from cropr_jax import tasks
from cropr_jax.data import pipeline
from cropr_jax.data.open import Splits
if __name__ == "__main__":
    config = {config(data={"workers": 1})!r}
    examples = tasks.create(config).training(config["preprocess"], Splits(config["data"]).train)
    batches = pipeline.train_batches(config, examples)
    next(batches)
    print(multiprocessing.active_children()[0].pid, flush=True)
    time.sleep(60)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as run:
        worker = int(run.stdout.readline())
        assert is_running(worker)
        run.kill()
    deadline = time.monotonic() + 20
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(worker)


def is_running(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("count", [1, 7, 8, 9, 30, 32])
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_evaluation_covers_every_example_once(count, hosts):
    setting = config(data={"num_examples": count, "eval": {"test": "test"}})
    shares = [list(evaluate(setting, "test", h, hosts)) for h in range(hosts)]
    assert len({len(share) for share in shares}) == 1
    ids = []
    for batch in itertools.chain(*shares):
        assert batch["image"].shape == (8 // hosts, 8, 8, 3)
        real = batch["mask"] > 0
        ids.extend(batch["id"][real])
        assert (batch["id"][~real] == -1).all() and (batch["image"][~real] == 0).all()
        assert set(np.unique(batch["mask"])) <= {0, 1}
    assert sorted(ids) == list(range(count))


def test_evaluation_is_in_order_and_by_name():
    (batch,) = evaluate(config(), "few")
    np.testing.assert_array_equal(batch["id"], [0, 1, 2, 3, 4, -1, -1, -1])
    splits = Splits(config()["data"])
    assert len(splits.eval("few")) == 5 and len(splits.train) == 30
    assert len(splits.train.class_names) == 5
    with pytest.raises(ConfigError, match="no 'validation', only test, few"):
        evaluate(config(), "validation")


def test_batches_that_do_not_fit_are_refused_at_the_call():
    with pytest.raises(ConfigError, match=r"config\.batch_size is 8.*multiple of the 3"):
        train(config(), 0, 0, 3)
    with pytest.raises(ConfigError, match=r"config\.eval_batch_size is 8.*multiple of the 3"):
        evaluate(config(), "test", 0, 3)
    with pytest.raises(
        ConfigError, match=r"config\.batch_size: 64, .*'train' has 30 examples: choose"
    ):
        train(config(batch_size=64))


def test_parts_divide_the_rows():
    for rows in range(1, 200):
        for size in (1, 2**20, 2**22):
            part = pipeline._part(rows, size)
            assert rows % part == 0 and 1 <= part <= 32 and part * size <= 64 * 2**20
    assert pipeline._part(512, 224 * 224 * 3 * 4) == 32
    # As many bytes however large an example is, and always one.
    assert pipeline._part(64, 6 * 2**20) == 8 and pipeline._part(64, 2**30) == 1


@pytest.mark.parametrize("name", ["", "few"])
@pytest.mark.parametrize("make", [config, maps])
def test_the_filler_tells_the_size_of_an_example(make, name):
    batches = evaluate(make(), name) if name else train(make())
    (batch,) = take(batches, 1)
    size = sum(value.nbytes for key, value in batch.items() if key not in ("id", "mask"))
    assert 8 * examples(make(), name).bytes == size


@dataclasses.dataclass
class Counted:
    """Stands for the transform of large examples, and writes down how many it was asked for."""

    file: Path

    def __call__(self, record, rng=None):
        with open(self.file, "ab", buffering=0) as file:
            file.write(b".")
        return {"image": np.zeros(1, np.float32)}


def settled(file):
    """How many were asked for when no more are."""
    count = -1
    while count != (count := file.stat().st_size):
        time.sleep(0.5)
    return count


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["", "test"])
def test_what_waits_is_bounded_in_bytes(tmp_path, monkeypatch, name, workers):
    """Of 1536 x 1536 pixels, 28 MB each, what nobody has asked for yet is 512 MB a worker."""
    monkeypatch.setattr(pipeline.os, "cpu_count", lambda: 64)
    data = {"num_examples": 512, "workers": workers}
    setting = config(batch_size=64, eval_batch_size=64, data=data)
    image = np.broadcast_to(np.float32(0), (1536, 1536, 3))
    large = Examples(examples(setting, name).source, Counted(tmp_path / "asked"), {"image": image})
    assert large.bytes == 1536 * 1536 * 3 * 4
    make = pipeline.eval_batches if name else pipeline.train_batches
    batches = make(setting, large)
    try:
        next(batches)
        waiting = settled(tmp_path / "asked") - 64
    finally:
        batches.close()
    assert 0 < waiting * large.bytes <= max(workers, 1) * 512 * 2**20


# The package's own __init__ is left out: what the workers load are these modules.
PROGRAM = """
import sys, types
package = types.ModuleType("cropr_jax")
package.__path__ = [{path!r}]
sys.modules["cropr_jax"] = package
import importlib
for name in {modules!r}:
    importlib.import_module("cropr_jax." + name)
found = sys.modules.keys() & set({forbidden!r})
assert not found, found
"""


@pytest.mark.parametrize(
    "modules, forbidden",
    [
        (
            [
                "data.ade20k",
                "data.annotations",
                "data.digits",
                "data.open",
                "data.rand_augment",
                "data.readers.arrays",
                "data.readers.fake",
                "data.readers.image_folder",
                "data.readers.segmentation_folder",
                "data.readers.tfds",
                "data.readers.tfrecord",
                "data.records",
            ],
            ["tensorflow", "jax"],
        ),
        (
            ["data.preprocess", "data.augment", "data.classification", "data.segmentation"],
            ["tensorflow", "jax", "grain", "tensorflow_datasets", "absl", "ml_collections"],
        ),
        (["data.pipeline"], ["tensorflow"]),
        (["bench.input"], ["tensorflow", "jax", "grain", "tensorflow_datasets", "absl"]),
    ],
)
def test_modules_do_without(modules, forbidden):
    program = PROGRAM.format(path=str(ROOT / "cropr_jax"), modules=modules, forbidden=forbidden)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_worker_that_is_killed_is_one_line():
    """As the kernel does where memory runs out."""
    batches = train(config(data={"workers": 1}))
    next(batches)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"^config\.data\.workers: a process that reads .* -9"):
        list(itertools.islice(batches, 100))


@dataclasses.dataclass(frozen=True)
class Broken:
    """A reader whose third example raises what it is given."""

    error: Exception
    kind, class_names = CLASS, ("a", "b")

    def __len__(self):
        return 8

    def __call__(self, index):
        if index == 2:
            raise self.error
        return np.zeros((8, 8, 3), np.uint8), index % 2

    def where(self, index):
        return f"/data/{index}.jpg"


ERRORS = [OSError("image file is truncated"), ValueError("bad"), SyntaxError("broken PNG"),
          RuntimeError("Corrupted\nrecord"), EOFError(), Image.DecompressionBombError("big"),
          struct.error("unpack requires"), OverflowError("too long")]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("make", [pipeline.train_batches, pipeline.eval_batches])
def test_an_example_that_cannot_be_read_is_named(error, make):
    whole = config()
    task, source = tasks.create(whole), Source(Broken(error), 0, 8)
    made = task.training if make is pipeline.train_batches else task.evaluation
    with pytest.raises(ExampleError) as said:
        list(itertools.islice(make(whole, made(whole["preprocess"], source)), 1))
    assert str(said.value).startswith("/data/2.jpg: the example cannot be read (")
    assert type(error).__name__ in str(said.value) and "\n" not in str(said.value)


@pytest.mark.slow
def test_and_so_is_one_that_a_worker_cannot_read():
    whole = config(data={"workers": 2})
    task, source = tasks.create(whole), Source(Broken(OSError("truncated")), 0, 8)
    examples = task.evaluation(whole["preprocess"], source)
    with pytest.raises(ExampleError, match="^/data/2.jpg: the example cannot be read .OSError: tr"):
        list(pipeline.eval_batches(whole, examples))


def test_slips_of_a_program_are_not_blamed_on_the_data():
    whole = config()
    task, source = tasks.create(whole), Source(Broken(TypeError("slip")), 0, 8)
    with pytest.raises(TypeError, match="slip"):
        list(pipeline.eval_batches(whole, task.evaluation(whole["preprocess"], source)))
