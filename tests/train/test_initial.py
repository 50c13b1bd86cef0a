"""Starting from weights: a head for other classes, another grid, a file of another model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_config

from cropr_jax import models
from cropr_jax.convert.files import write_safetensors
from cropr_jax.convert.to_timm import rename
from cropr_jax.errors import ConfigError
from cropr_jax.train import checkpoints, initial
from cropr_jax.train.checkpoints import Checkpoints
from cropr_jax.train.optimizer import TrainState, flatten


def tiny(**kwargs):
    return models.create({**tiny_config.get_config().model.to_dict(), **kwargs})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A work directory with one checkpoint, and its parameters."""
    params = models.init(tiny(), jax.random.key(7))
    workdir = tmp_path_factory.mktemp("run")
    with Checkpoints(workdir) as saved:
        saved.save(3, TrainState(jnp.asarray(3), params, (), None), {"top1": 0.5})
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
    key = jax.random.key(5)
    got, _ = initial.initial_params(path, tiny(num_classes=6), key)
    whole = models.init(tiny(num_classes=6), key)
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
