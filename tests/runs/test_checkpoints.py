"""Saving, keeping, refusing and reading in part, on states made up by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from cropr_jax.core.trees import flatten
from cropr_jax.errors import CheckpointError
from cropr_jax.runs import checkpoints, directory
from cropr_jax.runs.writer import Checkpoints
from cropr_jax.train import sharding
from cropr_jax.train.optimizer import adamw, depth_of
from cropr_jax.train.state import create_state


def made_up(seed=0, width=8, blocks=2):
    draw = np.random.default_rng(seed)

    def leaf(*shape):
        return jnp.asarray(draw.normal(size=shape).astype(np.float32))

    return {
        **{f"block_{i}": {"mlp": {"kernel": leaf(width, 4), "bias": leaf(4)}}
           for i in range(blocks)},
        "reducer_0": {"scorer": {"queries": leaf(1, width)},
                      "aggregator": {"kernel": leaf(width, width)}},
    }  # fmt: skip


def state_of(params, step=0, ema=True):
    names = tuple(flatten(params))
    state = create_state(params, adamw(names, depth_of(names), lambda _: 0.1), names, ema)
    return state._replace(step=jnp.asarray(step, jnp.int32))


def mesh_of(data, fsdp):
    devices = np.array(jax.devices()[: data * fsdp]).reshape(data, fsdp)
    return Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def wanted(state, mesh):
    return checkpoints.abstract(state, sharding.state_shardings(state, mesh))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(left, right)
        assert left.dtype == right.dtype


def test_bit_equal_on_other_device_counts(tmp_path):
    state = state_of(made_up())
    eight = mesh_of(2, 4)
    cut = jax.device_put(state, sharding.state_shardings(state, eight))
    with Checkpoints(tmp_path, "top1") as saved:
        saved.save(3, cut)
        saved.wait()
        for mesh in (mesh_of(1, 1), mesh_of(8, 1), mesh_of(1, 2)):
            target = wanted(state, mesh)
            again = checkpoints.restore(saved.path(3), target)
            assert_same(again, state)
            for leaf, want in zip(jax.tree.leaves(again), jax.tree.leaves(target), strict=True):
                assert leaf.sharding == want.sharding


def test_teacher_is_kept_where_there_is_one(tmp_path):
    """And a run without one reads what was saved before there were any."""
    plain = state_of(made_up())
    taught = plain._replace(teacher=made_up(1))
    for name, state in (("plain", plain), ("taught", taught)):
        with Checkpoints(tmp_path / name, "top1") as saved:
            saved.save(1, state)
            saved.wait()
            stored = checkpoints.ocp.metadata(saved.path(1)).metadata
            assert ("teacher" in stored) == (name == "taught")
            assert_same(checkpoints.restore(saved.path(1), wanted(state, mesh_of(2, 4))), state)
            params = checkpoints.restore_params(saved.path(1), wanted(state, mesh_of(1, 1)).params)
            assert params.keys() == state.params.keys()
    with pytest.raises(CheckpointError, match="it has no 'teacher/block_0"):
        checkpoints.restore(tmp_path / "plain/checkpoints/1", wanted(taught, mesh_of(1, 1)))


def test_state_may_be_donated_after_save(tmp_path):
    state = state_of(made_up())
    before = jax.device_get(state)
    clear = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)
    with Checkpoints(tmp_path, "top1") as saved:
        saved.save(1, state)
        clear(state)
        saved.wait()
        assert_same(checkpoints.restore(saved.path(1), wanted(before, mesh_of(1, 1))), before)


def test_last_and_best_are_kept(tmp_path):
    state = state_of(made_up(), ema=False)
    with Checkpoints(tmp_path, "top1") as saved:
        for step, top1 in [(1, 0.2), (2, 0.5), (3, None), (4, 0.5), (5, 0.1), (6, None)]:
            saved.save(step, state)
            if top1 is not None:
                saved.rank(step, {"top1": top1, "loss": 1.0})
        saved.wait()
        kept = sorted(int(p.name) for p in saved.root.iterdir())
        assert kept[-1] == saved.last == 6
        assert len(kept) == 2 and saved.best[1]["top1"] == 0.5
        assert saved.best[0] == kept[0]
    assert checkpoints.find(tmp_path, "top1").name == str(kept[0])
    assert checkpoints.find(tmp_path, None).name == "6"


def test_metrics_that_earlier_versions_gave_to_orbax(tmp_path):
    """They rank with those of today, and today's go first."""
    state = state_of(made_up(), ema=False)
    with Checkpoints(tmp_path, "top1") as saved:
        for step, top1 in ((1, 0.7), (2, 0.4)):
            tree = checkpoints.state_dict(state)
            saved._steps.save(step, tree, metrics={"top1": top1}, force=True)
        assert saved.best == (1, {"top1": 0.7})
        saved.save(3, state)
        saved.rank(3, {"top1": 0.6})
        assert saved.best[0] == 1 and saved.evaluated(3) and not saved.evaluated(2)
        saved.rank(3, {"top1": 0.8})
    assert sorted(checkpoints.complete(tmp_path)) == [3]
    assert checkpoints.find(tmp_path, "top1").name == "3"


def test_a_step_that_is_not_to_be_ranked(tmp_path):
    state = state_of(made_up(), ema=False)
    with Checkpoints(tmp_path, "top1") as saved:
        saved.save(1, state)
        saved.rank(1, {})
        assert saved.evaluated(1) and saved.best is None
    with Checkpoints(tmp_path, "top1") as saved:
        assert saved.evaluated(1) and saved.best is None
    assert checkpoints.find(tmp_path, "top1").name == "1"


@pytest.mark.parametrize("content", ["", "[1]", '{"x": {}}', '{"1": 3}', '{"1": {"top1": 0.5}'])
def test_a_damaged_ranking_is_one_line(tmp_path, content):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "ranking.json").write_text(content)
    with pytest.raises(CheckpointError, match="ranking.json' is damaged .*: remove it"):
        checkpoints.complete(tmp_path)


def test_numbers_that_are_not_finite_are_no_json(tmp_path):
    with Checkpoints(tmp_path, "top1") as saved:
        saved.save(1, state_of(made_up(), ema=False))
        with pytest.raises(ValueError, match="not JSON compliant"):
            saved.rank(1, {"top1": float("nan")})


def test_saving_a_step_again_does_nothing(tmp_path):
    state = state_of(made_up(), ema=False)
    with Checkpoints(tmp_path, "top1") as saved:
        saved.save(1, state)
        saved.save(1, state_of(made_up(seed=1), ema=False))
        saved.wait()
        assert_same(checkpoints.restore(saved.path(1), wanted(state, mesh_of(1, 1))), state)


@pytest.mark.parametrize(("other", "message"), [
    ({"blocks": 3}, "has no 'params/block_2/mlp/bias' .*float32\\[4\\]"),
    ({"blocks": 1}, "has 'params/block_1/mlp/"),
    ({"width": 6}, "'params/block_0/mlp/kernel' is float32\\[8, 4\\] there, .*\\[6, 4\\]"),
])  # fmt: skip
def test_another_model_is_refused_by_name(tmp_path, other, message):
    with Checkpoints(tmp_path, "top1") as saved:
        saved.save(1, state_of(made_up()))
    with pytest.raises(CheckpointError, match=message):
        checkpoints.restore(saved.path(1), wanted(state_of(made_up(**other)), mesh_of(1, 1)))


def test_another_dtype_is_refused(tmp_path):
    with Checkpoints(tmp_path, "top1") as saved:
        saved.save(1, state_of(made_up()))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state_of(made_up()))
    with pytest.raises(CheckpointError, match="float32.* there, expected bfloat16"):
        checkpoints.restore(saved.path(1), wanted(half, mesh_of(1, 1)))


def part():
    return {
        "block_1": {"mlp": {"bias": jax.ShapeDtypeStruct((4,), jnp.float32)}},
        "reducer_0": {"scorer": {"queries": jax.ShapeDtypeStruct((1, 8), jnp.float32)}},
    }


def test_part_of_the_parameters(tmp_path, monkeypatch):
    params = made_up()
    average = {k: v + 1 for k, v in flatten(params).items()}
    state = state_of(params)._replace(ema=average)
    with Checkpoints(tmp_path, "top1") as saved:
        saved.save(1, state)
        saved.rank(1, {"top1": 0.5})
    asked = []
    load = checkpoints.ocp.load
    monkeypatch.setattr(
        checkpoints.ocp, "load", lambda path, tree: asked.append(tree) or load(path, tree)
    )
    for place in (tmp_path, tmp_path / "checkpoints" / "1"):
        got = checkpoints.restore_params(directory.step_directory(place), part())
        np.testing.assert_array_equal(
            got["block_1"]["mlp"]["bias"], params["block_1"]["mlp"]["bias"] + 1
        )
    raw = checkpoints.restore_params(tmp_path / "checkpoints" / "1", part(), average=False)
    assert set(flatten(raw)) == set(flatten(part()))
    np.testing.assert_array_equal(
        raw["reducer_0"]["scorer"]["queries"], params["reducer_0"]["scorer"]["queries"]
    )
    for tree in asked:
        read = [x for x in jax.tree.leaves(tree) if x is not checkpoints.ocp.PLACEHOLDER]
        assert len(read) == 2


def test_part_that_is_not_there(tmp_path):
    with Checkpoints(tmp_path, "top1") as saved:
        saved.save(1, state_of(made_up()))
    missing = {"block_7": {"bias": jax.ShapeDtypeStruct((4,), jnp.float32)}}
    with pytest.raises(CheckpointError, match="no 'block_7/bias'"):
        checkpoints.restore_params(directory.step_directory(tmp_path), missing)


def test_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoints.find(tmp_path, "top1")
    (tmp_path / "stray").mkdir()
    with pytest.raises(CheckpointError, match="not a readable checkpoint"):
        checkpoints.restore_params(tmp_path / "stray", part())


def test_what_a_kill_left_is_cleared(tmp_path):
    with Checkpoints(tmp_path, "top1") as saved:
        saved.save(1, state_of(made_up()))
        saved.wait()
        left = saved.root / "2.orbax-checkpoint-tmp"
    left.mkdir()
    (left / "half").write_text("")
    with Checkpoints(tmp_path, "top1") as saved:
        assert saved.last == 1
        saved.save(2, state_of(made_up(), 2))
    assert checkpoints.find(tmp_path, None).name == "2"


def test_failure_of_the_writer_comes_out(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="writing a checkpoint .* failed .*disk full"):
        with Checkpoints(tmp_path, "top1") as saved:
            saved.save(1, state_of(made_up()))
            pending = saved._pending

            class Broken:
                def result(self):
                    pending.result()
                    raise OSError("disk full")

            saved._pending = Broken()


def test_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="choose another --workdir"):
        Checkpoints(tmp_path / "file", "top1")
