"""The ADE20k builder on a made-up release: what it writes, what it refuses."""

import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA
from PIL import Image

from cropr_jax import tasks
from cropr_jax.data import ade20k, pipeline
from cropr_jax.data.open import Splits, open_source
from cropr_jax.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {"train": 5, "validation": 2}


def table(path):
    """The file of names as the release has it, or as its authors' later repository."""
    names = [f"thing {i}, object {i}" for i in range(1, 151)]
    names[3:5] = ["door, double door", "door"]
    if path.suffix == ".txt":
        lines = ["Idx\tRatio\tTrain\tVal\tName"]
        lines += [f"{i}\t0.1\t 2\t 3\t{name}" for i, name in enumerate(names, 1)]
    else:
        lines = ["Idx,Ratio,Train,Val,Stuff,Name"]
        lines += [f"{i},0.1,2,3,1,{name.replace(', ', ';')}" for i, name in enumerate(names, 1)]
    path.write_text("\n".join(lines) + "\n")


def make_release(root):
    root.mkdir(parents=True)
    table(root / "objectInfo150.txt")
    rng = np.random.default_rng(0)
    for split, count in (("training", 5), ("validation", 2)):
        for i in range(1, count + 1):
            size = (8 + i, 12 - i)
            name = f"ADE_{split[:5]}_{i:08}"
            for kind, array, suffix in (
                ("images", rng.integers(0, 256, (*size, 3), np.uint8), ".jpg"),
                ("annotations", rng.integers(0, 151, size, np.uint8), ".png"),
            ):
                folder = root / kind / split
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(folder / f"{name}{suffix}")
    return root


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return make_release(tmp_path_factory.mktemp("ade") / "ADEChallengeData2016")


@pytest.fixture(scope="module")
def prepared(release, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    # The folder above the release is found too.
    ade20k.prepare(str(release.parent), str(folder), EXAMPLES)
    return folder


def data(folder, **changes):
    return {"source": "tfds", "name": "ade20k", "dir": str(folder), **changes}


def test_written_once_and_read_back(release, prepared, capfd):
    folder = ade20k.prepare(str(release), str(prepared), EXAMPLES)
    assert folder == prepared / "ade20k" / "1.0.0" and capfd.readouterr() == ("", "")
    assert list(folder.glob("*train.array_record*")), "read without TensorFlow"
    for split, part in (("train", "training"), ("validation", "validation")):
        source = pickle.loads(pickle.dumps(open_source(data(prepared), split)))
        assert len(source) == EXAMPLES[split] and source.num_classes == 150
        files = {path.read_bytes(): path for path in (release / "images" / part).glob("*")}
        assert len(files) == len(source)
        for i in range(len(source)):
            path = files.pop(source[i]["image"])
            mask = np.asarray(Image.open(release / "annotations" / part / f"{path.stem}.png"))
            # 0 to 255 and k to k - 1, which is what bytes do below 0.
            np.testing.assert_array_equal(source[i]["label"], mask - np.uint8(1))
    assert open_source(data(prepared), "train").reader.largest() == (13, 11)
    assert open_source(data(prepared), "validation[1:]").reader.largest() == (10, 11)
    assert len(open_source(data(prepared, zero_is_ignored=True, num_classes=150), "train")) == 5


def test_batches_are_made_of_it(prepared):
    preprocess = {"res": (8, 8), "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    config = {
        "task": "segmentation",
        "eval_batch_size": 2,
        "data": {**data(prepared), "train": "train", "eval": {"v": "validation"}, "workers": 0},
        "preprocess": preprocess,
    }
    source = Splits(config["data"]).eval("v")
    examples = tasks.create(config).evaluation(preprocess, source)
    (batch,) = pipeline.eval_batches(config, examples)
    assert batch["label"].shape == (2, 10, 11)
    assert sorted(map(tuple, batch["size"].tolist())) == [(9, 11), (10, 10)]
    with pytest.raises(ConfigError, match="labels are maps, but config.task is 'classification'"):
        tasks.get("classification")().evaluation(preprocess, source)


def test_names(release, tmp_path):
    names = ade20k.read_names(release)
    assert len(names) == 150 and names[0] == "thing 1" and names[149] == "thing 150"
    assert names[3:5] == ("door, double door", "door"), "synonyms where the first is not enough"
    table(tmp_path / "object150_info.csv")
    assert ade20k.read_names(tmp_path) == names
    text = (tmp_path / "object150_info.csv").read_text().splitlines()
    (tmp_path / "object150_info.csv").write_text("\n".join(text[:-1]))
    with pytest.raises(ConfigError, match="object150_info.csv: 149 classes, expected 150"):
        ade20k.read_names(tmp_path)
    with pytest.raises(ConfigError, match="neither objectInfo150.txt nor object150_info.csv"):
        ade20k.read_names(tmp_path / "images")


@pytest.mark.parametrize(
    "files, message",
    [
        (["index_ade20k.pkl", "images/ADE/training/a.jpg"], "the full ADE20k release"),
        (["ADE20K_2021_17_01/images/ADE/training/a.jpg"], "the full ADE20k release"),
        (["ADE20K_2016_07_26/images/training/a/abbey/b_seg.png"], "the full ADE20k release"),
        (["images/training/a.jpg"], "no images/training and annotations/training"),
    ],
)
def test_other_releases_are_refused(tmp_path, files, message):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    with pytest.raises(ConfigError, match=message):
        ade20k.prepare(str(tmp_path), str(tmp_path / "tfds"))


def spoil(root, change):
    mask = next((root / "annotations" / "training").glob("*1.png"))
    ids = np.array(Image.open(mask))
    if change == "colours":
        Image.fromarray(np.repeat(ids[..., None], 3, -1)).save(mask)
    elif change == "shifted":
        Image.fromarray(np.where(ids == 0, 255, ids).astype(np.uint8)).save(mask)
    elif change == "size":
        Image.fromarray(ids[1:]).save(mask)
    elif change == "no mask":
        mask.unlink()


@pytest.mark.parametrize(
    "change, message",
    [
        ("colours", r"1\.png: a mask of mode RGB"),
        ("shifted", r"1\.png: id 255 .*changed to labels before"),
        ("size", r"1\.png: 8x11 pixels .*its image has 9x11"),
        ("no mask", r"5 images/training/\*\.jpg and 4 annotations/training/\*\.png, ADE_train_0+1"),
    ],
)
def test_bad_releases_are_named(release, tmp_path, change, message):
    root = tmp_path / "release"
    shutil.copytree(release, root)
    mask = next((root / "annotations" / "training").glob("*1.png"))
    ids = np.array(Image.open(mask))
    ids[0, 0] = 0
    Image.fromarray(ids).save(mask)
    spoil(root, change)
    with pytest.raises(ConfigError, match=message):
        ade20k.prepare(str(root), str(tmp_path / "tfds"), EXAMPLES)


def test_command(release, tmp_path):
    command = [sys.executable, "-m", "cropr_jax.data.ade20k", "--release", str(release)]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert re.search(r"error: .*: 5 images to train, expected 20210\.", done.stderr)


def test_the_other_sets_of_tfds_are_refused(tmp_path):
    for name in ("scene_parse150", "scene_parse150:1.0.0"):
        with pytest.raises(ConfigError, match=r"instance challenge.*Use 'ade20k'"):
            open_source(data(tmp_path, name=name), "train")
    with pytest.raises(ConfigError, match=r"ade20k.*python -m cropr_jax\.data\.ade20k"):
        open_source(data(tmp_path), "train")


@pytest.mark.real_data
def test_real_files(tmp_path):
    samples = DATA / "ade20k_samples"
    root = tmp_path / "ADEChallengeData2016"
    for kind, theirs, suffix in (("images", "images", "jpg"), ("annotations", "labels", "png")):
        for split, name in (("training", "train"), ("validation", "val")):
            (root / kind / split).mkdir(parents=True)
            for path in (samples / theirs).glob(f"ADE_{name}_*.{suffix}"):
                shutil.copy(path, root / kind / split)
    shutil.copy(samples / "object150_info.csv", root)
    examples = {"train": 1, "validation": 3}
    ade20k.prepare(str(root), str(tmp_path / "tfds"), examples)
    source = open_source(data(tmp_path / "tfds"), "validation")
    assert len(source) == 3 and source.reader.largest() == (512, 683)
    assert source.class_names[:3] == ("wall", "building", "sky")
    assert len(set(source.class_names)) == 150
    for i in range(3):
        label = source[i]["label"]
        assert label[label != 255].max() < 150 and (label == 255).mean() < 0.2
