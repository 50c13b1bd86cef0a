"""Starting from weights: a head for other classes, another grid, a file of another model."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_config
from conftest import environment

from cropr_jax import models
from cropr_jax.convert.files import write_safetensors
from cropr_jax.convert.to_timm import rename
from cropr_jax.core.trees import flatten, unflatten
from cropr_jax.errors import ConfigError
from cropr_jax.runs import checkpoints
from cropr_jax.runs.writer import Checkpoints
from cropr_jax.train import initial, recipe
from cropr_jax.train.state import TrainState


def tiny(**kwargs):
    return models.create({**tiny_config.get_config().model.to_dict(), **kwargs})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A work directory with one checkpoint, and its parameters."""
    params = models.init(tiny(), jax.random.key(7))
    workdir = tmp_path_factory.mktemp("run")
    with Checkpoints(workdir, "top1") as saved:
        saved.save(3, TrainState(jnp.asarray(3), params, (), None))
        saved.rank(3, {"top1": 0.5})
    return str(workdir), flatten(params)


def test_head_for_other_classes_is_fresh(run):
    path, stored = run
    got, notes = initial.initial_params(path, tiny(num_classes=6), jax.random.key(0))
    got = flatten(got)
    assert got["head/kernel"].shape == (16, 6)
    assert notes == ["fresh: head ((16, 4) there), reducer_*/auxiliary_head/linear ((16, 4) there)"]
    for name in ("cls", "block_2/mlp/fc1/kernel", "reducer_0/scorer/queries", "fc_norm/scale"):
        np.testing.assert_array_equal(got[name], stored[name])


def test_what_is_fresh_is_what_an_initialization_gives(run):
    path, _ = run
    model, key = tiny(num_classes=6, reduction={"name": "none"}), jax.random.key(5)
    got, _ = initial.initial_params(path, model, key)
    whole = models.init(model, key)
    np.testing.assert_array_equal(got["head"]["kernel"], whole["head"]["kernel"])
    assert jax.tree.structure(got) == jax.tree.structure(whole)


def test_only_what_the_model_needs_is_read(run, monkeypatch):
    """Of an unpruned model: no reducers."""
    path, _ = run
    asked = []
    restore = checkpoints.restore_params
    monkeypatch.setattr(
        checkpoints,
        "restore_params",
        lambda place, wanted: asked.extend(flatten(wanted)) or restore(place, wanted),
    )
    _, notes = initial.initial_params(path, tiny(reduction={"name": "none"}), jax.random.key(0))
    assert "head/kernel" in asked and not any("reducer" in name for name in asked)
    assert notes == ["left: reducer_* (not in the model)"]


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_files_of_other_names(run, tmp_path, suffix):
    _, stored = run
    state = rename({name: np.asarray(leaf) for name, leaf in stored.items()})
    path = tmp_path / f"timm.{suffix}"
    np.savez(path, **state) if suffix == "npz" else write_safetensors(path, state)
    got, notes = initial.initial_params(str(path), tiny(), jax.random.key(0))
    assert notes == ["fresh: reducer_* (not in the file)"]
    for name, leaf in flatten(got).items():
        if not name.startswith("reducer_"):
            np.testing.assert_array_equal(leaf, stored[name], err_msg=name)


@pytest.mark.parametrize("rule", ["timm", "torch"])
def test_positions_follow_the_grid(run, rule):
    path, _ = run
    got, notes = initial.initial_params(path, tiny(image_size=(12, 8)), jax.random.key(0), rule)
    assert got["pos_embed"].shape == (1, 1 + 24, 16)
    assert notes == ["positions resampled from 4 x 4 to 6 x 4"]


def test_another_backbone_is_refused(run):
    path, _ = run
    with pytest.raises(ConfigError, match="config.init: .* missing in the file: block_3/attn/"):
        initial.initial_params(path, tiny(depth=4), jax.random.key(0))
    with pytest.raises(ConfigError, match="block_0/attn/key/kernel is .* there, expected"):
        initial.initial_params(path, tiny(width=24, heads=3), jax.random.key(0))


def test_teacher_is_whole_or_refused(run):
    """Reducers are left; a head of other classes or the norm of another pool is no teacher's."""
    path, stored = run
    teacher = models.unpruned(tiny())
    got, notes = initial.teacher_params(path, teacher)
    assert notes == ["left: reducer_* (not in the model)"]
    assert flatten(got).keys() == flatten(models.abstract_params(teacher)).keys()
    np.testing.assert_array_equal(got["head"]["kernel"], stored["head/kernel"])
    for fields, lacking in (({"num_classes": 6}, "head/bias"), ({"pool": "cls"}, "norm/bias")):
        message = (
            f"config.teacher: .* has no '{lacking}' that fits .* give a model that was trained"
        )
        with pytest.raises(ConfigError, match=message):
            initial.teacher_params(path, models.unpruned(tiny(**fields)))
    with pytest.raises(ConfigError, match="config.teacher: .* missing in the file: block_3/attn/"):
        initial.teacher_params(path, models.unpruned(tiny(depth=4)))
    with pytest.raises(ConfigError, match="config.teacher: 'nowhere' does not exist"):
        initial.check_path("nowhere", "config.teacher")


def test_routers_start_from_the_norm_and_head_of_the_model(run, tmp_path):
    _, stored = run
    path = str(tmp_path / "whole.npz")
    np.savez(path, **{k: leaf for k, leaf in stored.items() if not k.startswith("reducer_")})
    got, notes = initial.router_params(path, tiny(), jax.random.key(0))
    assert notes == [
        "fresh: reducer_* (not in the file)",
        "auxiliary heads: copies of norm and head",
    ]
    head = got["reducer_0"]["auxiliary_head"]
    np.testing.assert_array_equal(head["norm"]["scale"], stored["fc_norm/scale"])
    for part in ("kernel", "bias"):
        np.testing.assert_array_equal(head["linear"][part], stored[f"head/{part}"])
    drawn = models.init(tiny(), jax.random.key(0))
    for module in ("scorer", "aggregator"):
        assert jax.tree.all(
            jax.tree.map(np.array_equal, got["reducer_0"][module], drawn["reducer_0"][module])
        )
    # Routers that are there already go on.
    again, notes = initial.router_params(run[0], tiny(), jax.random.key(0))
    assert notes == []
    kernel = again["reducer_0"]["auxiliary_head"]["linear"]["kernel"]
    np.testing.assert_array_equal(kernel, stored["reducer_0/auxiliary_head/linear/kernel"])
    for fields, lacking in (({"num_classes": 6}, "head/bias"), ({"pool": "cls"}, "norm/bias")):
        with pytest.raises(ConfigError, match=f"config.init: .* has no '{lacking}' that fits"):
            initial.router_params(path, tiny(**fields), jax.random.key(0))


def test_what_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="config.init: 'nowhere' does not exist"):
        initial.check_path("nowhere")
    initial.check_path("")
    initial.check_path("hf://owner/name/model.safetensors")
    (tmp_path / "x.bin").write_text("text")
    with pytest.raises(ConfigError, match="config.init: '.*x.bin': it starts with b'text'"):
        initial.initial_params(str(tmp_path / "x.bin"), tiny(), jax.random.key(0))
    with pytest.raises(ConfigError, match="config.init: .* is not a readable checkpoint"):
        initial.initial_params(str(tmp_path), tiny(), jax.random.key(0))


ON_ONE_DEVICE = """
import sys, jax, numpy as np
import cropr_jax
from cropr_jax.core.trees import flatten
from cropr_jax.train.initial import initial_params

workdir, out = sys.argv[1:]
assert jax.device_count() == 1
predictor = cropr_jax.load(workdir)
params, notes = initial_params(workdir, predictor.model.clone(slim=False), jax.random.key(0))
assert not notes, notes
np.savez(out, **flatten(params), query=predictor.params["reducer_0"]["scorer"]["query"])
"""


@pytest.mark.slow
def test_a_run_of_eight_devices_starts_and_predicts_on_one(run, tmp_path):
    _, stored = run
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = {
        name: jax.device_put(
            leaf,
            jax.NamedSharding(mesh, jax.P("fsdp") if leaf.shape[0] % 8 == 0 else jax.P()),
        )
        for name, leaf in stored.items()
    }
    config = tiny_config.get_config()
    with Checkpoints(tmp_path, "top1") as saved:
        saved.save(1, TrainState(jnp.asarray(1), unflatten(spread), (), None))
    (tmp_path / "config.json").write_text(
        json.dumps({"task": config.task, "model": config.model.to_dict(), "preprocess": {}})
    )
    subprocess.run(
        [sys.executable, "-c", ON_ONE_DEVICE, str(tmp_path), str(tmp_path / "out.npz")],
        env=environment(),
        check=True,
    )
    with np.load(tmp_path / "out.npz") as found:
        query = np.asarray(stored["reducer_0/scorer/queries"]).sum(0)
        np.testing.assert_allclose(found["query"], query, atol=1e-6)
        for name, leaf in stored.items():
            np.testing.assert_array_equal(found[name], leaf, err_msg=name)


def test_unknown_rules_are_refused_early():
    config = tiny_config.get_config()
    config.init_resampling = "lanczos"
    with pytest.raises(ConfigError, match="config.init_resampling: found 'lanczos', expected"):
        recipe.resolve(config)


@pytest.mark.parametrize(("path", "hint"), [
    ("timm/vit_tiny_patch16_224", "named as in 'hf://timm/vit_tiny_patch16_224/model.safetensors'"),
    ("none.npz", "a work or step directory of a run"),
])  # fmt: skip
def test_a_name_of_the_hub_is_told_apart(path, hint):
    with pytest.raises(ConfigError) as said:
        initial.check_path(path)
    assert hint in str(said.value)
