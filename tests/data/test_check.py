"""The command that reads all examples: everything that is wrong, in one go."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY, environment
from PIL import Image

from cropr_jax.data import check
from cropr_jax.errors import ConfigError

# Of ml_collections, which reads config files so.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

CONFIG = str(REPOSITORY / "configs" / "image_folder.py") + ":vit_ti,res=64"
MASKS = str(REPOSITORY / "configs" / "segmentation_folder.py") + ":vit_ti,res=64"


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 70), ("test", 3)):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (4, 4)).save(tmp_path / split / name / f"{i:02}.png")
    return tmp_path


def arguments(folder, *more):
    return ["--config", CONFIG, f"--config.data.dir={folder}", "--workers", "0", *more]


def test_all_is_well(folder, capsys):
    check.main(arguments(folder))
    lines = capsys.readouterr().out.splitlines()
    expected = ["train: 140 examples, 0 cannot be used", "test: 6 examples, 0 cannot be used"]
    assert lines == expected


def test_everything_that_is_wrong_is_listed(folder, capsys):
    (folder / "train" / "cat" / "05.png").write_bytes(b"")
    (folder / "train" / "dog" / "69.png").write_text("<html>")
    whole = (folder / "test" / "dog" / "01.png").read_bytes()
    (folder / "test" / "dog" / "01.png").write_bytes(whole[:40])
    with pytest.raises(SystemExit) as left:
        check.main(arguments(folder))
    lines = capsys.readouterr().out.splitlines()
    assert left.value.code == 1
    assert lines[:2] == [
        "train: 140 examples, 2 cannot be used", "test: 6 examples, 1 cannot be used",
    ]  # fmt: skip
    wrong = ("train/cat/05.png", "train/dog/69.png", "test/dog/01.png")
    assert len(lines) == 5
    for line, file in zip(lines[2:], wrong, strict=True):
        assert line.startswith(f"{folder}/{file}: the example cannot be read (")


def test_a_split_that_cannot_be_opened_does_not_hide_the_others(folder, capsys):
    (folder / "test" / "dog").rename(folder / "test" / "bird")
    (folder / "train" / "cat" / "05.png").write_bytes(b"")
    with pytest.raises(SystemExit):
        check.main(arguments(folder))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train: 140 examples, 1 cannot be used"
    assert "train/cat/05.png" in lines[1] and "('bird') is not among the 2 of" in lines[2]


def test_masks(tmp_path, capsys):
    for split in ("train", "val"):
        for name in ("images", "labels"):
            (tmp_path / name / split).mkdir(parents=True)
        Image.new("RGB", (4, 6)).save(tmp_path / "images" / split / "0.png")
        Image.fromarray(np.zeros((6, 4), np.uint8)).save(tmp_path / "labels" / split / "0.png")
    (tmp_path / "meta.json").write_text('["sky", "road"]')
    check.main(["--config", MASKS, f"--config.data.dir={tmp_path}", "--workers", "0"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train: 1 examples, 0 cannot be used; no example of 1 classes: road"


@pytest.mark.parametrize(("more", "error"), [
    (["--config.data.dirr=x"], ConfigError), (["--worker=2"], SystemExit),
    (["--workers=-1"], SystemExit), (["here"], SystemExit),
])  # fmt: skip
def test_wrong_commands(folder, more, error):
    with pytest.raises(error):
        check.main(arguments(folder, *more))


@pytest.mark.slow
def test_the_command_with_workers(folder):
    (folder / "train" / "dog" / "69.png").write_text("<html>")
    done = subprocess.run(
        [sys.executable, "-m", "cropr_jax.data.check", *arguments(folder, "--workers=2")],
        cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "train/dog/69.png: the example cannot be read" in done.stdout
