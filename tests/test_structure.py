"""The house: how large rooms, files and functions are, and that imports run one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

PACKAGE = REPOSITORY / "cropr_jax"
FILES = sorted(PACKAGE.rglob("*.py"))
FOLDERS, SINGLE_FILES, LINES, FUNCTION = 12, 6, 350, 60


def test_the_root_is_small():
    folders = [p for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"]
    assert len(folders) <= FOLDERS
    assert len([p for p in PACKAGE.glob("*.py") if p.name != "__init__.py"]) <= SINGLE_FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_sizes(path):
    """No file over 350 lines; a function over 60 says why in its docstring."""
    text = path.read_text()
    assert len(text.splitlines()) <= LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= FUNCTION:
            assert "Long because" in (ast.get_docstring(node) or ""), node.name


def test_imports_run_one_way():
    """The contracts of `pyproject.toml` hold, and none has exceptions."""
    settings = (REPOSITORY / "pyproject.toml").read_text()
    assert "[[tool.importlinter.contracts]]" in settings and "ignore_imports" not in settings
    tool = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([tool, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_tests_lie_in_the_same_rooms():
    """A folder of tests is a folder of the package."""
    rooms = {p.parent.relative_to(PACKAGE) for p in FILES}
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        assert path.parent.relative_to(REPOSITORY / "tests") in rooms, path
