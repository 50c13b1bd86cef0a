"""Starting from weights: a head for other classes, another grid, a file of another model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_config

from cropr_jax import models
from cropr_jax.errors import ConfigError
from cropr_jax.train import initial
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
    (note,) = notes
    assert note.startswith("fresh: ") and note.count(" there)") == 2
    assert "head (" in note and "reducer_*/auxiliary_head/linear (" in note
    for name in ("cls", "block_2/mlp/fc1/kernel", "reducer_0/scorer/queries", "fc_norm/scale"):
        np.testing.assert_array_equal(got[name], stored[name])


def test_positions_follow_the_grid(run):
    path, _ = run
    got, notes = initial.initial_params(path, tiny(image_size=(12, 8)), jax.random.key(0))
    assert got["pos_embed"].shape == (1, 1 + 24, 16)
    assert notes == ["positions resampled from 4 x 4 to 6 x 4"]


def test_another_backbone_is_refused(run):
    path, _ = run
    with pytest.raises(ConfigError, match="'block_3/.*' is missing in"):
        initial.initial_params(path, tiny(depth=4), jax.random.key(0))
    with pytest.raises(ConfigError, match="config.init: 'block_0/.*has shape .*expected shape"):
        initial.initial_params(path, tiny(width=24, heads=3), jax.random.key(0))


def test_what_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="config.init: 'nowhere' does not exist"):
        initial.check_path("nowhere")
    initial.check_path("")
    (tmp_path / "x.bin").write_text("")
    with pytest.raises(ConfigError, match="neither a .npz nor a directory"):
        initial.read(str(tmp_path / "x.bin"), tiny())
