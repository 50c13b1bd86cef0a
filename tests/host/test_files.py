"""Files are whole at any moment, whenever their writer dies."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment

from cropr_jax.errors import ConfigError
from cropr_jax.host.files import locked, new_file, write_json


class Killed(BaseException):
    """What no handler of errors catches, as a kill is caught by none."""


def die_amid_writing(monkeypatch):
    write = Path.write_text

    def half(path, text):
        write(path, text[: len(text) // 2])
        raise Killed

    monkeypatch.setattr(Path, "write_text", half)


def die_before_renaming(monkeypatch):
    def never(path, target):
        raise Killed

    for name in ("replace", "rename"):
        monkeypatch.setattr(Path, name, never)


@pytest.mark.parametrize("die", [die_amid_writing, die_before_renaming])
@pytest.mark.parametrize("before", [None, {"step": 1, "best": [1, 2, 3]}])
def test_a_kill_leaves_the_file_of_before(tmp_path, monkeypatch, die, before):
    path = tmp_path / "result.json"
    if before is not None:
        write_json(path, before)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        die(patched)
        write_json(path, {"step": 2, "best": [4, 5, 6]})
    assert path.exists() == (before is not None)
    if before is not None:
        assert json.loads(path.read_text()) == before
    # Whatever the kill left beside it is no hindrance.
    write_json(path, {"step": 3})
    assert json.loads(path.read_text()) == {"step": 3}
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_json_files(tmp_path):
    """Readable, in folders that need not be there, and nothing else beside."""
    path = tmp_path / "a" / "b" / "config.json"
    write_json(path, {"lr": 0.1, "names": ["x"]})
    assert path.read_text() == '{\n  "lr": 0.1,\n  "names": [\n    "x"\n  ]\n}\n'
    write_json(path, {"lr": 0.2}, indent=1)
    assert path.read_text() == '{\n "lr": 0.2\n}\n'
    assert [file.name for file in path.parent.iterdir()] == ["config.json"]


def test_what_is_no_json_leaves_the_file_of_before(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(path, {"a": {1, 2}})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_is_there_when_all_went_well(tmp_path):
    path = tmp_path / "model.onnx"
    with new_file(path) as part:
        part.write_bytes(b"first half, ")
        # In the same folder: moving it to another disk would be no one step.
        assert part.parent == tmp_path and not path.exists()
        with part.open("ab") as file:
            file.write(b"second half")
    assert path.read_bytes() == b"first half, second half"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyError, Killed])
def test_a_new_file_is_not_there_after_an_error(tmp_path, error):
    path = tmp_path / "model.onnx"
    with pytest.raises(error), new_file(path) as part:
        part.write_bytes(b"half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_disk_names_the_file(tmp_path):
    path = tmp_path / "model.onnx"
    message = f"'{path}' cannot be written: .*No space left"
    with pytest.raises(ConfigError, match=message), new_file(path) as part:
        part.write_bytes(b"half")
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_kept(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_text("old")
    message = f"'{path}' exists; remove it or name another file"
    with pytest.raises(ConfigError, match=message), new_file(path):
        raise AssertionError("nothing is written")
    assert path.read_text() == "old"


def test_the_folder_must_be_there(tmp_path):
    path = tmp_path / "gone" / "model.onnx"
    message = f"'{path}' cannot be written: there is no folder '{path.parent}'"
    with pytest.raises(ConfigError, match=message), new_file(path):
        raise AssertionError("nothing is written")


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with new_file("~/model.onnx") as part:
        part.write_text("x")
    assert (tmp_path / "model.onnx").read_text() == "x"


def test_a_folder_is_locked_for_one(tmp_path):
    place = tmp_path / "deep" / "run"
    with locked(place):
        message = rf"is in use by process {os.getpid()} on .*: wait"
        with pytest.raises(ConfigError, match=message), locked(place):
            pytest.fail("entered twice")
    with locked(place):
        pass


def test_a_lock_ends_with_its_process(tmp_path):
    program = (
        "import os, sys, pathlib\nfrom cropr_jax.host.files import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n    os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment(), check=False)
    with locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "run"
    with pytest.raises(ConfigError, match="cannot write to .*file/run"), locked(place):
        pass
