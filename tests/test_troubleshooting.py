"""docs/troubleshooting.md: its lines are lines of the code."""

import ast
import re

import pytest
from conftest import REPOSITORY


def said():
    """All that string literals of the package say, joined where Python joins them."""
    found = []
    for path in [*(REPOSITORY / "cropr_jax").rglob("*.py"), REPOSITORY / "run.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


SAID = said()
PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
LINES = re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE)


def test_there_are_lines():
    assert len(LINES) >= 20


@pytest.mark.parametrize("line", LINES)
def test_each_line_is_one_of_the_code(line):
    """What stands between the places that are filled in, in this order, in one message."""
    pattern = ".*".join(map(re.escape, line.split("…")))
    assert any(re.search(pattern, text, re.DOTALL) for text in SAID), line
