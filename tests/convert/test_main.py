"""The command: what it writes can be loaded, and what it prints is what it would do."""

import subprocess
import sys

import numpy as np
import pytest
import tiny_config
from flax import traverse_util
from state_dicts import CROPR, EVA02, VIT, cropr_names, eva_names, made

from cropr_jax import models
from cropr_jax.convert import __main__ as command
from cropr_jax.convert import architecture, files
from cropr_jax.convert.load import load
from cropr_jax.convert.sources import recognise
from cropr_jax.convert.to_timm import rename
from cropr_jax.errors import ConfigError


def stored(tmp_path, state):
    np.savez(tmp_path / "src.npz", **state)
    return str(tmp_path / "src.npz")


def run(*words):
    command.main([*words, "--heads", "2"])


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
@pytest.mark.parametrize(
    ("fields", "name"), [(VIT | CROPR, cropr_names), (EVA02, lambda f: eva_names(rename(f)))]
)
def test_all_that_is_known_is_kept(tmp_path, capsys, fields, name, to):
    model, flat = made(fields)
    dst = str(tmp_path / "dst")
    run(stored(tmp_path, name(flat)), dst, "--to", to)
    assert f"{len(flat)} parameters of kind" in capsys.readouterr().out
    loaded = load(dst, model)
    assert not loaded.plan.fresh and not loaded.plan.dropped
    for key, value in flat.items():
        np.testing.assert_array_equal(loaded.params[key], value, err_msg=key)


def test_to_timm(tmp_path, capsys):
    _, flat = made(VIT | CROPR)
    dst = tmp_path / "dst.safetensors"
    run(stored(tmp_path, flat), str(dst), "--to", "timm")
    assert "left: reducers (unknown to timm)" in capsys.readouterr().out
    found, expected = files.read(dst).arrays, rename(flat)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value)


def test_another_size(tmp_path):
    _, flat = made(VIT | CROPR)
    dst = str(tmp_path / "dst.safetensors")
    words = ["--image_size", "10x40", "--patch", "5"]
    # Sixteen entries may be two rows of eight already.
    with pytest.raises(ConfigError, match="of 4 x 4 patches or of the model's 2 x 8"):
        run(stored(tmp_path, rename(flat)), dst, *words)
    run(stored(tmp_path, rename(flat)), dst, *words, "--grid", "4x4")
    # Two rows of eight: the file says so, though sixteen could be a square.
    model = models.create(VIT | {"image_size": (10, 40), "patch": 5})
    assert load(dst, model).notes() == []


def test_a_grid_is_written_down(tmp_path):
    """Once told, the file tells it."""
    wide = VIT | {"image_size": (12, 20)}
    _, flat = made(wide)
    dst = str(tmp_path / "dst.safetensors")
    run(stored(tmp_path, rename(flat)), dst, "--grid", "3x5")
    loaded = load(dst, models.create(wide))
    assert loaded.notes() == []
    np.testing.assert_array_equal(loaded.params["pos_embed"], flat["pos_embed"])


@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
def test_a_config_says_what_is_needed(tmp_path, capsys):
    fields = tiny_config.get_config().model.to_dict()
    _, flat = made(fields | {"image_size": (6, 6), "num_classes": 9})
    dst = str(tmp_path / "dst.safetensors")
    command.main([stored(tmp_path, rename(flat)), dst, "--config", tiny_config.__file__])
    assert "positions resampled from 3 x 3 to 4 x 4; fresh: head" in capsys.readouterr().out
    assert "head/kernel" not in files.read(dst).arrays
    loaded = load(dst, models.create(fields))
    assert loaded.notes() == ["fresh: head (not in the file), reducer_* (not in the file)"]


def test_dry_run_says_what_goes_where(tmp_path, capsys):
    _, flat = made(EVA02 | {"num_classes": 0})
    state = eva_names(rename(flat)) | {"mask_token": np.zeros((1, 1, 16), np.float32)}
    run(stored(tmp_path, state), "--dry_run", "--patch", "8", "--image_size", "32")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["Kind:", "EVA"]
    assert "blocks.1.mlp.w3.weight 16 x 42 block_1/mlp/down/kernel 42 x 16".split() in lines
    kernel = next(line for line in lines if line[0] == "patch_embed.proj.weight")
    assert " ".join(kernel).endswith("8 x 8 x 3 x 16 patch kernel resampled from 4 x 4 to 8 x 8")
    assert ["'mask_token'", "-", "used", "in", "pretraining", "only"] in lines
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["src.npz"], "DST: nothing given"),
        (["src.npz", "src.npz"], "DST: 'src.npz' exists"),
        (["src.npz", "no/dst"], "there is no folder 'no'"),
        (["none.npz", "dst"], "'none.npz': it does not exist"),
        (["src.npz", "dst", "--image_size", "15"], "not a multiple of the patch"),
        (["src.npz", "dst", "--config", "c.py", "--patch", "2"], "--config: it says what"),
        (["src.npz", "dst", "--config", "c.py"], "there is no file 'c.py'"),
        (["src.npz", "dst", "--grid", "3x5"], "17 entries, .* not those of the grid 3 x 5"),
        (["src.npz", "dst", "--heads", "5"], "which it has in no model of 5 heads"),
    ],
)
def test_wrong_commands(tmp_path, monkeypatch, words, message):
    stored(tmp_path, rename(made(VIT)[1]))
    monkeypatch.chdir(tmp_path)
    more = [] if {"--heads", "--config"} & set(words) else ["--heads", "2"]
    with pytest.raises(ConfigError, match=message):
        command.main([*words, *more])
    assert not (tmp_path / "dst").exists()


def test_unknown_names_stop_a_conversion(tmp_path):
    state = rename(made(VIT)[1]) | {"dist_token": np.zeros(1)}
    with pytest.raises(ConfigError, match="unused in the file: 'dist_token'"):
        run(stored(tmp_path, state), str(tmp_path / "dst"))
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    "fields",
    [
        VIT | {"pool": "cls", "layer_scale": 1.0, "prefix": 3},
        VIT | {"prefix": 0, "num_classes": 0, "mlp_ratio": 2.5},
        VIT | {"width": 24, "heads": 3, "mlp_ratio": 35 / 24},
        EVA02 | {"mlp": "swiglu"},
        EVA02 | {"width": 24, "heads": 3},
    ],
)
def test_the_model_is_known_by_its_weights(fields):
    model, flat = made(fields)
    found = models.create(architecture.model_fields(recognise(rename(flat), model.heads)))
    assert traverse_util.flatten_dict(models.abstract_params(found), sep="/").keys() == flat.keys()
    for name in ("image_size", "patch", "heads", "hidden", "prefix", "pool", "mlp", "num_classes"):
        assert getattr(found, name) == getattr(model, name), name
    assert found.rope_reference == model.rope_reference


@pytest.mark.parametrize("name", architecture.NEEDED)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_sizes_of_zero_tell_no_model(name, axis):
    _, flat = made(VIT)
    shape = list(flat[name].shape)
    shape[axis] = 0
    flat[name] = np.zeros(shape)
    with pytest.raises(ConfigError, match=f"'{name}', which tells the model's size, has shape"):
        architecture.model_fields(recognise(flat))


def test_errors_are_one_line():
    words = [sys.executable, "-m", "cropr_jax.convert", "nowhere.npz", "--dry_run"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: 'nowhere.npz': it does not exist")
    assert done.stderr.count("\n") == 1
