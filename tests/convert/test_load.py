"""Loading: the fit to a model, all that differs in one error, nothing half loaded."""

import re
from pathlib import Path

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import weight_files
from conftest import fixture_names, load_fixture
from flax import traverse_util
from state_dicts import CROPR, EVA02, VIT, made, without_pool

from cropr_jax import models
from cropr_jax.convert.files import write_safetensors
from cropr_jax.convert.load import load
from cropr_jax.convert.resample import resample_positions
from cropr_jax.convert.timm import from_state_dict
from cropr_jax.convert.to_timm import rename
from cropr_jax.errors import ConfigError

TOKENS, LOGITS, RESAMPLED = 1e-4, 2e-5, 2e-5
# Of the architectures that there are.
CONVERTED = [*fixture_names("convert_vit"), *fixture_names("convert_eva02")]


def write(path, state, **metadata):
    """A file of the format that its name says."""
    if path.suffix == ".npz":
        np.savez(path, **state)
    elif path.suffix == ".pth":
        tree, storages = weight_files.dense(state)
        path.write_bytes(weight_files.pth_bytes({"model": tree, "epoch": 3}, storages))
    else:
        write_safetensors(path, state, metadata)
    return str(path)


def part(arrays, prefix):
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def converted_model(meta, **fields):
    kwargs = meta["config"]["kwargs"]
    fields |= {
        "image_size": kwargs["img_size"],
        "patch": kwargs["patch_size"],
        "width": kwargs["embed_dim"],
        "depth": kwargs["depth"],
        "heads": kwargs["num_heads"],
        "num_classes": kwargs["num_classes"],
        "pool": {"avg": "mean_patches", "token": "cls"}[kwargs["global_pool"]],
    }
    if meta["config"]["cls"] == "timm Eva":
        fields |= {
            "name": "eva02",
            "mlp": "swiglu_norm" if kwargs["scale_mlp"] else "swiglu",
            "mlp_ratio": kwargs["mlp_ratio"],
            "rope_reference": kwargs["ref_feat_shape"],
        }
    return models.create(fields)


@pytest.mark.parity
@pytest.mark.parametrize("suffix", [".npz", ".pth", ".safetensors"])
@pytest.mark.parametrize("name", CONVERTED)
def test_as_timm_converts(tmp_path, name, suffix):
    arrays, meta = load_fixture(name)
    model = converted_model(meta)
    loaded = load(write(tmp_path / f"ckpt{suffix}", part(arrays, "in/ckpt/")), model)

    wanted = from_state_dict(part(arrays, "w/"), model.heads)
    wanted = traverse_util.flatten_dict(wanted, sep="/")
    lacking = rename({k: wanted[k] for k in loaded.plan.fresh})
    assert set(lacking) == set(meta["config"]["not_in_checkpoint"])
    assert set(meta["config"]["unused"]) <= set(loaded.plan.dropped)
    assert wanted.keys() - loaded.plan.fresh.keys() == loaded.params.keys()
    for key, value in loaded.params.items():
        resized = key in loaded.plan.resized
        atol = RESAMPLED if resized else 0
        np.testing.assert_allclose(value, wanted[key], rtol=0, atol=atol, err_msg=key)
    if suffix != ".npz":
        return
    params = traverse_util.unflatten_dict(wanted | loaded.params, sep="/")
    images = jnp.asarray(arrays["in/x"].transpose(0, 2, 3, 1))
    logits, out = jax.jit(lambda p, x: model.apply({"params": p}, x))(params, images)
    np.testing.assert_allclose(logits, arrays["out/logits"], atol=LOGITS)
    np.testing.assert_allclose(out["pre_logits"], arrays["out/pre_logits"], atol=LOGITS)
    for key in (key for key in arrays if re.fullmatch(r"out/block\.\d+", key)):
        block = int(key.rpartition(".")[2])
        np.testing.assert_allclose(out["features"][block], arrays[key], atol=TOKENS)


@pytest.mark.parity
@pytest.mark.parametrize("name", [*fixture_names("vit_cropr"), *fixture_names("segm_cropr")])
def test_weights_of_the_authors(tmp_path, name):
    """Whole into the same model; of a segmenter, all but heads into a classifier."""
    arrays, meta = load_fixture(name)
    segmenter = name.startswith("segm")
    kwargs = meta["config"]["kwargs"]
    cropr = meta["config"].get("cropr_cfg", {})
    reduction = {
        "name": "cropr",
        "rate": 1,
        "fusion": "llf" if cropr.get("llf", True) else "none",
        "options": {
            "heads": cropr.get("num_heads", 1),
            "projections": bool(cropr.get("k_proj")),
            "pre_norm": bool(cropr.get("pre_attn_norm")),
        },
    }
    fields = {
        "name": "eva02" if segmenter else "vit",
        "image_size": kwargs["img_size"],
        "patch": kwargs["patch_size"],
        "width": kwargs["embed_dim"],
        "depth": kwargs["depth"],
        "heads": kwargs["num_heads"],
        "num_classes": kwargs["num_classes"],
        "pool": {"avg": "mean_all", "token": "cls"}[kwargs["global_pool"]],
        "reduction": reduction,
    }
    path = write(tmp_path / "cropr.pth", part(arrays, "w/"))
    same = without_pool(fields) | {"head": "segmentation"} if segmenter else fields
    loaded = load(path, models.create(same))
    assert loaded.kind == "Cropr" and not loaded.plan.dropped and not loaded.plan.fresh
    if not segmenter:
        return
    loaded = load(path, models.create(fields | {"num_classes": 3}))
    heads = ("head/", "auxiliary_head/linear", "scorer/queries")
    assert loaded.plan.fresh
    assert all(any(head in name for head in heads) for name in loaded.plan.fresh)
    queries = (cropr["num_queries"], kwargs["embed_dim"])
    assert f"reducer_*/scorer ({queries} there)" in "".join(loaded.notes())


def test_a_head_for_other_classes_and_new_reducers(tmp_path):
    _, flat = made(VIT)
    path = write(tmp_path / "x.npz", rename(flat))
    loaded = load(path, models.create(VIT | CROPR | {"num_classes": 7}))
    assert {name.split("/")[0] for name in loaded.plan.fresh} == {"head", "reducer_0"}
    assert loaded.notes() == ["fresh: head ((16, 5) there), reducer_* (not in the file)"]
    for name, value in loaded.params.items():
        np.testing.assert_array_equal(value, flat[name])
        assert value.dtype == np.float32 and value.flags.writeable and value.flags.c_contiguous


def test_a_segmenter_for_other_sizes(tmp_path):
    """Queries, one a patch, are resampled as positions are; of a fusion's block all else stays."""
    pruned = {"name": "cropr", "rate": 1, "fusion": "cross_attn"}
    fields = without_pool(VIT) | {"head": "segmentation", "depth": 3, "reduction": pruned}
    _, flat = made(fields)
    path = write(tmp_path / "x.npz", flat)
    assert load(path, models.create(fields)).notes() == []
    loaded = load(path, models.create(fields | {"image_size": (20, 24)}))
    names = ("reducer_0/scorer/queries", "fusion/queries")
    notes = ["positions resampled from 4 x 4 to 5 x 6"]
    assert sorted(loaded.notes()) == sorted(
        [*notes, *(f"{name} resampled like them" for name in names)]
    )
    for name in names:
        table = flat[name].reshape(1, 16, 16)
        expected = resample_positions(table, (5, 6), 0, (4, 4))[0]
        np.testing.assert_array_equal(loaded.params[name], expected)
    assert not loaded.plan.fresh
    plain = load(path, models.create(fields | {"reduction": {"name": "none"}}))
    assert {name.split("/")[0].split(".")[0] for name in plain.plan.dropped} == {
        "fusion",
        "reducer_0",
    }


@pytest.mark.parametrize("backbone", ["vit", "eva02"])
def test_a_segmenter_starts_from_the_last_norm(tmp_path, backbone):
    """A ViT's own, which its head sees every token under; of EVA-02 that of its pretraining."""
    fields = (VIT | {"pool": "cls"}) if backbone == "vit" else EVA02
    _, flat = made(fields)
    state = {name: value for name, value in rename(flat).items() if not name.startswith("head.")}
    if backbone == "eva02":
        state = {name.replace("fc_norm.", "norm."): value for name, value in state.items()}
        state["mask_token"] = np.zeros((1, 1, 16), np.float32)
    model = models.create(without_pool(fields) | {"head": "segmentation", "num_classes": 7})
    loaded = load(write(tmp_path / "x.npz", state), model)
    assert set(loaded.plan.fresh) == {"head/kernel", "head/bias"}
    name = f"{model.head_norm}/scale"
    np.testing.assert_array_equal(loaded.params[name], flat[name])


def test_norm_of_another_pooling(tmp_path):
    """MAE's last norm is left, and `fc_norm` starts fresh, as MAE fine-tunes."""
    _, flat = made(VIT | {"pool": "cls"})
    loaded = load(write(tmp_path / "x.npz", rename(flat)), models.create(VIT))
    assert set(loaded.plan.fresh) == {"fc_norm/scale", "fc_norm/bias"}
    assert loaded.plan.dropped == dict.fromkeys(("norm.weight", "norm.bias"), "not in the model")


def test_every_difference_is_listed(tmp_path):
    _, flat = made(VIT)
    state = rename(flat)
    del state["blocks.0.norm1.bias"], state["blocks.1.attn.qkv.weight"]
    state["blocks.1.mlp.fc1.weight"] = np.zeros((8, 16), np.float32)
    state |= {"dist_token": np.zeros(1), "blocks.2.norm1.bias": np.zeros(16, np.float32)}
    path = write(tmp_path / "x.npz", state)
    with pytest.raises(ConfigError) as error:
        load(path, models.create(VIT))
    assert str(error.value) == (
        f"'{path}': weights of kind 'timm' are not those of the model: missing in the file: "
        "block_0/norm1/bias, block_1/attn/key/kernel, block_1/attn/query/kernel, "
        "block_1/attn/value/kernel; unused in the file: 'dist_token', 'blocks.2.norm1.bias'; of "
        "another shape: block_1/mlp/fc1/kernel is (16, 8) there, expected (16, 64)"
    )


@pytest.mark.parametrize(
    ("there", "here", "hint"),
    [
        (VIT, VIT | {"layer_scale": 1.0}, "the weights have no LayerScale"),
        (VIT | {"layer_scale": 1.0}, VIT, "set layer_scale to any number"),
        (VIT, VIT | {"prefix": 0}, "the weights have 1 prefix tokens"),
        (VIT | {"prefix": 0}, VIT, "the weights have no CLS token: prefix=0"),
        (VIT, EVA02, "the weights are no EVA-02"),
        (EVA02, VIT, "they are an EVA-02's"),
        (EVA02, EVA02 | {"mlp": "swiglu"}, "set mlp='swiglu_norm'"),
        (EVA02 | {"mlp": "swiglu"}, EVA02, "set mlp='swiglu'"),
        (VIT | {"depth": 3}, VIT, "unused in the file: 'blocks.2.attn.proj.bias'"),
        (VIT | {"width": 24, "heads": 3}, VIT, "of another shape"),
    ],
)
def test_another_architecture(tmp_path, there, here, hint):
    path = write(tmp_path / "x.npz", rename(made(there)[1]))
    with pytest.raises(ConfigError, match=re.escape(hint)):
        load(path, models.create(here))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_types_become_float32(tmp_path, dtype):
    _, flat = made(VIT)
    state = {name: value.astype(jnp.dtype(dtype)) for name, value in rename(flat).items()}
    loaded = load(write(tmp_path / "x.safetensors", state), models.create(VIT))
    exact = dtype.startswith("float") and dtype != "float16"
    for name, value in loaded.params.items():
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, flat[name], rtol=0 if exact else 1e-2)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (np.nan, np.float32, "'blocks.1.norm2.bias' holds 1 NaN"),
        (-np.inf, np.float16, "'blocks.1.norm2.bias' holds 1 NaN or infinite"),
        (1e300, np.float64, "'blocks.1.norm2.bias' holds 1 NaN or infinite"),
        (1, np.int32, "'blocks.1.norm2.bias' is of int32, expected real numbers"),
    ],
)
@pytest.mark.parametrize("suffix", [".npz", ".pth", ".safetensors"])
def test_numbers_that_are_none(tmp_path, suffix, value, dtype, message):
    state = rename(made(VIT)[1])
    state["blocks.1.norm2.bias"] = state["blocks.1.norm2.bias"].astype(dtype)
    state["blocks.1.norm2.bias"][3] = value
    with pytest.raises(ConfigError, match=message):
        load(write(tmp_path / f"x{suffix}", state), models.create(VIT))


def test_what_is_left_need_not_be_finite(tmp_path):
    state = rename(made(VIT)[1])
    state["head.bias"][0] = np.nan
    path = write(tmp_path / "x.npz", state)
    assert load(path, models.create(VIT | {"num_classes": 7})).params
    with pytest.raises(ConfigError, match="'head.bias' holds 1 NaN"):
        load(path, models.create(VIT))


@pytest.mark.parametrize("rule", ["timm", "torch"])
def test_another_grid_and_patch(tmp_path, rule):
    _, flat = made(VIT)
    path = write(tmp_path / "x.npz", rename(flat))
    model = models.create(VIT | {"image_size": (20, 30), "patch": (5, 6)})
    loaded = load(path, model, resampling=rule)
    assert loaded.params["pos_embed"].shape == (1, 21, 16)
    assert loaded.params["patch_embed/kernel"].shape == (5, 6, 3, 16)
    assert loaded.notes() == [
        "patch kernel resampled from 4 x 4 to 5 x 6",
        "positions resampled from 4 x 4 to 4 x 5",
    ]
    with pytest.raises(ConfigError, match="resampling: found 'area'"):
        load(path, model, resampling="area")


def test_grids_that_are_not_square(tmp_path):
    """Foreign files do not tell them: the model or the user does, and where neither can, nobody."""
    wide = VIT | {"image_size": (8, 12)}
    _, flat = made(wide)
    path = write(tmp_path / "x.npz", rename(flat))
    assert not load(path, models.create(wide)).notes()
    with pytest.raises(ConfigError, match="pos_embed has 7 entries; without 1 .* no square.*HxW"):
        load(path, models.create(VIT))
    loaded = load(path, models.create(VIT), grid=(2, 3))
    assert loaded.notes() == ["positions resampled from 2 x 3 to 4 x 4"]
    with pytest.raises(ConfigError, match="7 entries, 1 of them .* not those of the grid 2 x 4"):
        load(path, models.create(VIT), grid=(2, 4))


def test_a_grid_of_as_many_patches(tmp_path):
    """2 x 8 patches are 16 as 4 x 4 are."""
    _, flat = made(VIT)
    path = write(tmp_path / "x.npz", rename(flat))
    model = models.create(VIT | {"image_size": (8, 32)})
    message = "of 4 x 4 patches or of the model's 2 x 8.*--grid 4x4 .or 2x8."
    with pytest.raises(ConfigError, match=message):
        load(path, model)
    assert load(path, model, grid=(4, 4)).notes() == ["positions resampled from 4 x 4 to 2 x 8"]
    assert not load(path, model, grid=(2, 8)).notes()
    # Our own say what they are.
    path = write(tmp_path / "ours.safetensors", flat, grid="2x8")
    loaded = load(path, model)
    assert not loaded.notes()
    np.testing.assert_array_equal(loaded.params["pos_embed"], flat["pos_embed"])
    assert load(path, models.create(VIT)).notes() == ["positions resampled from 2 x 8 to 4 x 4"]
    with pytest.raises(ConfigError, match="4 x 4 was given, but the file says 2 x 8"):
        load(path, model, grid=(4, 4))
    path = write(tmp_path / "wrong.safetensors", flat, grid="3x5")
    with pytest.raises(ConfigError, match="not those of the grid 3 x 5"):
        load(path, model)


def test_a_square_with_or_without_an_entry_for_cls(tmp_path):
    """16 entries are those of 4 x 4 patches, as in timm's `no_embed_class`, or of CLS and 3 x 5."""
    wide = VIT | {"image_size": (12, 20)}
    _, flat = made(wide)
    path = write(tmp_path / "x.npz", rename(flat))
    model = models.create(wide)
    with pytest.raises(ConfigError, match="of 4 x 4 patches or of the model's 3 x 5.*--grid 4x4"):
        load(path, model)
    loaded = load(path, model, grid=(3, 5))
    np.testing.assert_array_equal(loaded.params["pos_embed"], flat["pos_embed"])
    loaded = load(path, models.create(VIT))
    np.testing.assert_array_equal(loaded.params["pos_embed"][:, 1:], flat["pos_embed"])
    assert not loaded.params["pos_embed"][:, 0].any()


def test_from_an_address(tmp_path):
    _, flat = made(VIT)
    content = Path(write(tmp_path / "x.pth", rename(flat))).read_bytes()
    with fsspec.open("memory://models/x.pth", "wb") as file:
        file.write(content)
    loaded = load("memory://models/x.pth", models.create(VIT))
    for name, value in flat.items():
        np.testing.assert_array_equal(loaded.params[name], value)
    with pytest.raises(ConfigError, match="'memory://models/none': the download failed"):
        load("memory://models/none", models.create(VIT))


def test_slim_models_are_made_after_loading(tmp_path):
    path = write(tmp_path / "x.npz", rename(made(VIT)[1]))
    with pytest.raises(ConfigError, match="takes the training form"):
        load(path, models.create(VIT | CROPR).clone(slim=True))
