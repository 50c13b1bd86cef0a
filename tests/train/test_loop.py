"""Whole runs of run.py in processes of their own: killed, asked to stop, resumed, refused."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_config
from conftest import environment, random_params
from training import assert_same_state, records, state_in

import cropr_jax
from cropr_jax.core.trees import flatten
from cropr_jax.errors import ConfigError
from cropr_jax.train import fields, loop, recipe
from cropr_jax.train.logging import drop_records_after
from cropr_jax.train.run import Run, prefetch

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "tests" / "tiny_config.py")

# Runs run.py with something done to it first; the programs differ in nothing else.
INTERRUPTED = """
import os, runpy, signal, sys, time
from cropr_jax.train import loop

def kill_in_step(step):
    seen = loop.Preemption.at
    def at(self, now):
        if now == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return seen(self, now)
    loop.Preemption.at = at

def kill_in_save(step):
    save = loop.Checkpoints.save
    def killed(self, now, *rest):
        save(self, now, *rest)
        if now == step:
            os.kill(os.getpid(), signal.SIGKILL)
    loop.Checkpoints.save = killed

def kill_in_evaluation(step):
    rank = loop.Checkpoints.rank
    def killed(self, now, metrics):
        if now == step:
            self.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        rank(self, now, metrics)
    loop.Checkpoints.rank = killed

def ask_to_stop(step, number=signal.SIGTERM, group=False, times=1):
    seen = loop.Preemption.at
    def at(self, now):
        if now == step:
            for _ in range(times):
                (os.killpg if group else os.kill)(os.getpid(), number)
        return seen(self, now)
    loop.Preemption.at = at

def look_late(seconds):
    look = loop.checkpoints.started
    def started(workdir):
        time.sleep(seconds)
        return look(workdir)
    loop.checkpoints.started = started

{what}
sys.argv = {argv!r}
runpy.run_path("run.py", run_name="__main__")
"""


def start(workdir, cache, *arguments, what=""):
    """Exit status, standard output and standard error of one start of run.py on one device."""
    argv = ["run.py", "--config", CONFIG, "--workdir", str(workdir), "--cache_dir", str(cache)]
    program = INTERRUPTED.format(what=what, argv=[*argv, *arguments])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(), capture_output=True,
        text=True, timeout=300, check=False, start_new_session=True,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Compiled programs, shared by all starts."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, cache):
    workdir = tmp_path_factory.mktemp("whole")
    status, out, err = start(workdir, cache)
    assert status == 0, err
    return workdir, out


@pytest.mark.slow
def test_what_a_run_leaves(uninterrupted, cache):
    workdir, out = uninterrupted
    assert "Recipe" in out and "Result" in out
    result = json.loads((workdir / "result.json").read_text())
    assert set(result["metrics"]["test"]) == {"top1", "top5", "loss", "examples"}
    assert result["metrics"]["test"]["examples"] == 21
    assert result["tokens"] == [13] and result["versions"]["jax"] == jax.__version__
    assert result["config"] == fields.settled(fields.plain(tiny_config.get_config()))
    assert [row["step"] for row in records(workdir)] == [2, 4, 4, 6, 8, 8]
    assert list((workdir / "tensorboard").glob("events*"))
    # Evaluating says the same; the step need not be compiled for it.
    status, out, err = start(workdir, cache, "--mode", "eval")
    assert status == 0, err
    again = json.loads((workdir / "eval.json").read_text())
    assert {"step": again["step"], **again["metrics"]["test"]} == result["best"]
    assert json.loads((workdir / "result.json").read_text()) == result


@pytest.mark.slow
def test_killed_and_stopped_and_resumed_is_the_same_run(tmp_path, uninterrupted, cache):
    """And what was compiled once is not compiled again."""
    before = set(os.listdir(cache))
    assert before
    status, _, _ = start(tmp_path, cache, what="kill_in_step(6)")
    assert status == -signal.SIGKILL
    assert not (tmp_path / "result.json").exists()
    status, out, err = start(tmp_path, cache, what="kill_in_save(6)")
    assert status == -signal.SIGKILL, err
    assert re.search("Resumes after step [34] ", out)  # 4 may not have been all on disk
    status, out, err = start(tmp_path, cache, what="ask_to_stop(7)")
    assert status == 0, err
    assert "SIGTERM: saved step 7 of 8" in out
    status, out, err = start(tmp_path, cache)
    assert status == 0, err
    assert "Resumes after step 7" in out
    workdir, _ = uninterrupted
    assert_same_state(state_in(tmp_path, 8), state_in(workdir, 8))
    evaluations = [row for row in records(workdir) if row["split"] == "test"]
    assert [row for row in records(tmp_path) if row["split"] == "test"] == evaluations
    # Resuming a finished run evaluates it again and trains nothing.
    status, out, err = start(tmp_path, cache)
    assert status == 0 and "Compiled" not in out, err
    assert {name for name in os.listdir(cache) if name.endswith("-cache")} <= before


@pytest.mark.slow
def test_killed_between_save_and_ranking(tmp_path, uninterrupted, cache):
    """The evaluation that was lost is made first, and nothing is written twice."""
    status, _, _ = start(tmp_path, cache, what="kill_in_evaluation(4)")
    assert status == -signal.SIGKILL
    status, out, err = start(tmp_path, cache, what="kill_in_evaluation(8)")
    assert status == -signal.SIGKILL, err
    assert out.index("Resumes after step 4") < out.index("step 4: test") < out.index("Compiled")
    status, out, err = start(tmp_path, cache)
    assert status == 0 and "Compiled" not in out, err
    workdir, _ = uninterrupted
    assert records(tmp_path) == records(workdir)
    assert_same_state(state_in(tmp_path, 8), state_in(workdir, 8))
    one, other = (json.loads((d / "result.json").read_text()) for d in (tmp_path, workdir))
    assert one["best"] == other["best"] and one["metrics"] == other["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize(("signals", "expected", "said"), [
    ("signal.SIGTERM, group=True", 0, "SIGTERM: saved step 3 of 8"),
    ("signal.SIGINT, group=True", 130, "SIGINT: saved step 3 of 8"),
    ("signal.SIGINT, times=2", 130, ""),
])  # fmt: skip
def test_signals_to_all_processes(tmp_path, uninterrupted, cache, signals, expected, said):
    """As schedulers and terminals send them; the worker that reads outlives them."""
    workers = "--config.data.workers=1"
    status, out, err = start(tmp_path, cache, workers, what=f"ask_to_stop(3, {signals})")
    assert status == expected and said in out and "Traceback" not in err, err
    assert (tmp_path / "checkpoints" / "3").is_dir() == bool(said)
    status, out, err = start(tmp_path, cache, workers)
    assert status == 0, err
    workdir, _ = uninterrupted
    assert_same_state(state_in(tmp_path, 8), state_in(workdir, 8))


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "message"), [
    (["--config.optimizer.lr=0.1"], "config.optimizer.lr: 0.1, but the run in"),
    (["--config.batch_size=7"], "config.mixup.group = 8"),
])  # fmt: skip
def test_mistakes_are_one_line(uninterrupted, cache, arguments, message):
    status, _, err = start(uninterrupted[0], cache, *arguments)
    assert status == 2
    assert err.startswith("error: ") and message in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_another_model_in_the_same_place_is_refused(uninterrupted, cache, tmp_path):
    workdir, _ = uninterrupted
    status, _, err = start(
        workdir, cache, "--mode", "eval", "--config.model.width=24", "--config.model.heads=3"
    )
    assert status == 2 and "is of another model: 'block_0/" in err and err.count("\n") == 1


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    """Two processes of one device each against one process of two."""
    argv = ["run.py", "--config", CONFIG, "--cache_dir=", "--workdir"]
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    several = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    # One looks for checkpoints when the other could have begun to write them.
    both = [*argv, str(tmp_path / "two"), "--config.distributed"]
    late = INTERRUPTED.format(what="look_late(10)", argv=both)
    with contextlib.ExitStack() as stack:
        starts = []
        for i, program in enumerate((both, ["-c", late])):
            process = subprocess.Popen(
                [sys.executable, *program], cwd=ROOT,
                env=environment(**several, JAX_PROCESS_ID=str(i)),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            starts.append(stack.enter_context(process))
            stack.callback(process.kill)  # neither outlives the other's failure
        outputs = [process.communicate(timeout=300)[0] for process in starts]
    assert [process.returncode for process in starts] == [0, 0], "\n".join(outputs)
    assert "Result" in outputs[0] and "Result" not in outputs[1]
    one = environment(JAX_NUM_CPU_DEVICES="2")
    subprocess.run(
        [sys.executable, *argv, str(tmp_path / "one")], cwd=ROOT, env=one, check=True, timeout=300
    )
    together, alone = (state_in(tmp_path / name, 8) for name in ("two", "one"))
    assert together.keys() == alone.keys()
    for name, value in alone.items():
        # The gradient of the keys' bias is zero but for rounding, which Adam blows up.
        if not name.endswith("attn/key/bias"):
            np.testing.assert_allclose(together[name], value, atol=1e-6, err_msg=name)
    results = [json.loads((tmp_path / n / "result.json").read_text()) for n in ("two", "one")]
    assert results[0]["metrics"]["test"]["examples"] == 21
    assert results[0]["metrics"]["test"]["top1"] == results[1]["metrics"]["test"]["top1"]


def test_the_step_is_compiled_with_the_options():
    """Seen by one that XLA does not know, put in behind the check."""
    resolved = recipe.resolve(tiny_config.get_config("reduction=random"))
    config = resolved.config | {"compiler_options": {"xla_no_such": 1}}
    batch = resolved.task.example_batch(resolved.model, 16)
    with pytest.raises(RuntimeError, match="xla_no_such"):
        Run(dataclasses.replace(resolved, config=config)).compile_train(
            resolved.model.schedule, batch
        )


def test_prefetch_keeps_the_order_and_ends():
    mesh = recipe.sharding.make_mesh()
    made = []

    def batches():
        for i in range(5):
            made.append(i)
            yield {"x": np.full(8, i)}

    stream = prefetch(batches(), mesh, ahead=2)
    assert int(next(stream)["x"][0]) == 0 and made == [0, 1]
    assert [int(batch["x"][0]) for batch in stream] == [1, 2, 3, 4]


def test_records_to_be_written_again_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    drop_records_after(path, 3, evaluates=False)
    rows = [
        f'{{"step": {step}, "split": "{split}"}}\n'
        for step, split in ((2, "test"), (4, "train"), (3, "train"), (3, "test"))
    ]
    path.write_text("".join([*rows, '{"st']))
    drop_records_after(path, 3, evaluates=False)
    assert path.read_text() == "".join([rows[0], *rows[2:]])
    drop_records_after(path, 3, evaluates=True)  # and that of step 3 is written again
    assert path.read_text() == "".join([rows[0], rows[2]])


def test_loss_that_is_not_finite_ends_the_run():
    with pytest.raises(FloatingPointError, match="nan at step 7"):
        loop._check_finite(7, {"loss": float("nan")})


@pytest.mark.slow
def test_a_run_keeps_its_teacher(tmp_path, monkeypatch):
    """What is restored is bit by bit what was read, without reading it again."""
    config = tiny_config.get_config("reduction=dynamicvit")
    with config.unlocked():
        config.model.reduction.update({"fusion": "none", "options": {"distill": True}})
        config.teacher = str(tmp_path / "whole.npz")
    resolved = recipe.resolve(config)
    taught = flatten(random_params(resolved.training.teacher))
    np.savez(config.teacher, **taught)
    run = Run(resolved)
    state = run.initial_state()
    for name, leaf in flatten(state.teacher).items():
        np.testing.assert_array_equal(leaf, taught[name])
    Path(config.teacher).unlink()
    with pytest.raises(ConfigError, match="config.teacher: .* does not exist"):
        loop.train(config, tmp_path)
    assert not (tmp_path / "config.json").exists()
    with loop.Checkpoints(tmp_path, resolved.task.metric.name) as saved:
        saved.save(1, state)
        saved.wait()
        again = run.restore(saved.path(1))
        params = run.restore_params(saved.path(1))
    assert_same_state(flatten(again.teacher), taught)
    assert_same_state(flatten(params), flatten(state.params))

    class Started(Exception):
        pass

    def started(resolved):
        raise Started

    monkeypatch.setattr(loop, "Run", started)
    with pytest.raises(Started):  # the checkpoint has it all
        loop.train(config, tmp_path)


def test_routers_after_the_fact_are_a_run_like_any(tmp_path):
    """Read from a model without them; what is saved gives the slim predictor."""
    config = tiny_config.get_config()
    with config.unlocked():
        config.model.update({"drop_path": 0.0})
        config.model.reduction.fusion = "none"
        config.update({"train": "routers", "targets": "model", "init": str(tmp_path / "w.npz")})
    resolved = recipe.resolve(config)
    whole = flatten(random_params(resolved.training.teacher))
    np.savez(config.init, **whole)
    run = Run(resolved)
    state = run.initial_state()
    assert state.teacher is None
    loop._claim(tmp_path, resolved)
    with loop.Checkpoints(tmp_path, resolved.task.metric.name) as saved:
        saved.save(1, state)
    predictor = cropr_jax.load(tmp_path)
    found = flatten(predictor.params)
    queries = flatten(state.params)["reducer_0/scorer/queries"]
    np.testing.assert_allclose(found.pop("reducer_0/scorer/query"), queries.sum(0), rtol=1e-6)
    assert {name.split("/")[0] for name in found.keys() - whole.keys()} == {"reducer_1"}
    for name, leaf in whole.items():
        np.testing.assert_array_equal(found[name], leaf)
