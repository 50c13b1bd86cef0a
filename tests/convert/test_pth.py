"""PyTorch's `.pth`: entries, views and storages."""

import struct
import zipfile

import numpy as np
import pytest
from weight_files import (
    BFLOAT16,
    TYPES,
    Call,
    Name,
    arrays_of,
    check,
    dense,
    nothing_runs,
    pickled,
    pth_bytes,
    tensor,
)

from cropr_jax.convert import archives, files
from cropr_jax.errors import ConfigError


def test_pth_views_share_their_storage(tmp_path):
    numbers = np.arange(12, dtype=np.float32)
    tree = {
        "dense": tensor(numel=12, size=(3, 4), stride=(4, 1)),
        "tied": tensor(numel=12, size=(3, 4), stride=(4, 1)),
        "transposed": tensor(numel=12, size=(4, 3), stride=(1, 4)),
        "part": tensor(numel=12, offset=5, size=(3,), stride=(2,)),
        "last": tensor(numel=12, offset=11, size=(), stride=()),
    }
    path = tmp_path / "w"
    path.write_bytes(pth_bytes(tree, {"0": numbers.tobytes()}, root=""))
    weights = files.read(path)
    table = numbers.reshape(3, 4)
    expected = [table, table, table.T, numbers[5:11:2], numbers[11]]
    check(weights, dict(zip(tree, expected, strict=True)))
    assert np.shares_memory(weights.arrays["dense"], weights.arrays["tied"])
    assert np.shares_memory(weights.arrays["dense"], weights.arrays["transposed"])


def test_pth_of_big_endian_numbers(tmp_path):
    expected = arrays_of([dtype for dtype in TYPES if dtype != BFLOAT16])
    tree, storages = dense(expected)
    for key, array in zip(storages, expected.values(), strict=True):
        storages[key] = array.astype(array.dtype.newbyteorder(">")).tobytes()
    half = np.array([1.5, -2], BFLOAT16)
    tree["half"] = tensor("half", "BFloat16Storage", 2, 0, (2,), (1,))
    storages["half"] = half.view(np.uint16).byteswap().tobytes()
    path = tmp_path / "w"
    path.write_bytes(pth_bytes(tree, storages, byteorder=b"big"))
    check(files.read(path), {**expected, "half": half})


@pytest.mark.parametrize(
    ("present", "key", "wrapper"),
    [
        (["model"], None, "model"),
        (["state_dict_ema", "state_dict", "model_ema", "module", "model"], None, "model"),
        (["state_dict_ema", "state_dict", "model_ema", "module"], None, "module"),
        (["state_dict_ema", "state_dict", "model_ema"], None, "model_ema"),
        (["state_dict_ema", "state_dict"], None, "state_dict"),
        (["state_dict_ema"], None, "state_dict_ema"),
        (["model", "model_ema"], "model_ema", "model_ema"),
        (["model", "teacher"], "teacher", "teacher"),
    ],
)
def test_pth_wrappers_are_tried_in_order(tmp_path, present, key, wrapper):
    tree = {
        name: {"w": tensor(str(i), numel=1, size=(1,), stride=(1,))}
        for i, name in enumerate(present)
    }
    storages = {str(i): struct.pack("<f", i) for i in range(len(present))}
    tree.update(epoch=3, args=Call(Name("argparse", "Namespace"), ()), optimizer={"state": {}})
    path = tmp_path / "w"
    path.write_bytes(pth_bytes(tree, storages))
    weights = files.read(path, key=key)
    assert weights.wrapper == wrapper
    assert weights.arrays["w"].item() == present.index(wrapper)


ONE = tensor(numel=1, size=(1,), stride=(1,))
OTHER = tensor(kind="IntStorage", numel=1, size=(1,), stride=(1,))


@pytest.mark.parametrize(
    ("tree", "key", "message"),
    [
        ([ONE], None, "it holds a list; expected a dict"),
        (ONE, None, "it holds a Tensor"),
        ({}, None, "no arrays"),
        ({"model": {}}, None, "no arrays"),
        ({"w": ONE, "epoch": 3}, None, "it holds the int 'epoch'.*out of 'w', 'epoch'"),
        ({"model": {"w": ONE, "n": None}}, None, "under 'model' it holds the NoneType 'n'"),
        ({"model": {"w": {"x": ONE}}}, None, "under 'model' it holds the dict 'w'"),
        ({"model": {0: ONE}}, None, "the Tensor '0'"),
        ({"model": {"w": ONE}}, "ema", "no dict under key='ema'; it holds 'model'"),
        ({"model": {"w": ONE}, "epoch": 1}, "epoch", "no dict under key='epoch'"),
        ({"model": {"a\nb": ONE}}, None, "no plain text"),
        ({"model": {"": ONE}}, None, "no plain text"),
    ],
)
def test_pth_without_a_dict_of_tensors_is_refused(tmp_path, tree, key, message):
    path = tmp_path / "w.pth"
    path.write_bytes(pth_bytes(tree, {"0": bytes(4)}))
    with pytest.raises(ConfigError, match=message):
        files.read(path, key=key)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storages": {}}, "lacks the entry 'archive/data/0'"),
        ({"storages": {"0": bytes(3)}}, "has 3 bytes; expected 1 numbers of float32"),
        ({"storages": {"0": bytes(8)}}, "has 8 bytes"),
        ({"byteorder": b"middle"}, "byteorder is b'middle'"),
        ({"tree": {"w": ONE, "x": OTHER}}, "storage '0' is described in two ways"),
        ({"entries": [("other/data.pkl", b"")]}, "2 files data.pkl"),
        ({"entries": [("archive/constants.pkl", b"")]}, "TorchScript"),
        ({"compression": zipfile.ZIP_BZIP2}, "method 12"),
        ({"tree": pickled(Call(Name("os", "system"), ("true",)))}, "asks for 'os.system'"),
    ],
)
def test_pth_of_another_make_is_refused(tmp_path, options, message):
    path = tmp_path / "w.pth"
    options = {"tree": {"w": ONE}, "storages": {"0": bytes(4)}, **options}
    path.write_bytes(pth_bytes(**options))
    with nothing_runs(), pytest.raises(ConfigError, match=message) as error:
        files.read(path)
    assert str(path) in str(error.value)


def test_storages_of_what_is_left_out_are_not_read(tmp_path):
    tree = {"model": {"w": ONE}, "optimizer": {"m": tensor("gone")}}
    path = tmp_path / "w"
    path.write_bytes(pth_bytes(tree, {"0": bytes(4)}))
    assert list(files.read(path).arrays) == ["w"]


def test_tensors_that_are_one_storage_time_and_again_are_refused(tmp_path, monkeypatch):
    """A few bytes each, and each as large as the file when it is taken."""
    monkeypatch.setattr(archives, "MAX_INFLATED", 1 << 20)
    numel = 1 << 16
    tree = {f"w{i}": tensor("0", numel=numel, size=(numel,), stride=(1,)) for i in range(8)}
    path = tmp_path / "w"
    path.write_bytes(pth_bytes(tree, {"0": bytes(4 * numel)}))
    with pytest.raises(ConfigError, match="its tensors inflate from .* to 2097152 bytes"):
        files.read(path)
    path.write_bytes(pth_bytes({"a": tree["w0"], "b": tree["w1"]}, {"0": bytes(4 * numel)}))
    assert len(files.read(path).arrays) == 2
