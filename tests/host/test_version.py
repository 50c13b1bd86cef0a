"""Versions and the revision that results are signed with."""

import importlib.metadata
import platform
import re
import subprocess

import jax
import numpy as np
import pytest

import cropr_jax
from cropr_jax.host import version


def test_versions_of_what_is_installed():
    found = version.versions(("jax", "no-such-package", "numpy"))
    assert found == {
        "python": platform.python_version(),
        "cropr_jax": cropr_jax.__version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
    }


def test_versions_of_what_decides_numbers():
    found = version.versions()
    assert {"jax", "jaxlib", "flax", "optax", "numpy"} <= set(found)
    assert found["flax"] == importlib.metadata.version("flax")
    assert re.fullmatch(r"\d+\.\d+\.\d+", cropr_jax.__version__)


def git(root, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(root), *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """The root of a source tree that holds the module."""
    package = tmp_path / "cropr_jax" / "host"
    package.mkdir(parents=True)
    (package / "version.py").write_text("")
    monkeypatch.setattr(version, "__file__", str(package / "version.py"))
    # A repository that the folder of temporary files may lie in is none of its own.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return tmp_path


def test_revision_tells_local_changes(tree):
    git(tree, "init", "-q")
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "first")
    head = git(tree, "rev-parse", "HEAD")
    assert len(head) == 40 and version.revision() == head
    # Notes that nobody has added change no number.
    (tree / "notes.txt").write_text("x")
    assert version.revision() == head
    (tree / "cropr_jax" / "host" / "version.py").write_text("changed")
    assert version.revision() == f"{head}+"


def test_outside_of_a_repository_there_is_no_revision(tree):
    assert version.revision() == ""


def test_without_git_there_is_no_revision(tree, monkeypatch):
    monkeypatch.setenv("PATH", str(tree))
    assert version.revision() == ""
