"""The README's Python runs, and every file that the documentation points to exists."""

import re

import numpy as np
import pytest
from conftest import REPOSITORY
from PIL import Image

README = REPOSITORY / "README.md"
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_set_up_commands_come_first():
    lines = [line.strip() for line in README.read_text().splitlines() if line.strip()]
    assert lines[1] == (
        "pip install -r requirements-cpu.txt && python run.py --config configs/digits.py"
    )
    assert lines[2] == "pip install -r requirements-dev.txt && pytest"


@pytest.mark.slow
def test_python_blocks_run(capsys):
    blocks = python_blocks(README.read_text())
    assert len(blocks) == 3
    names = {"__name__": "readme"}
    exec(compile(blocks[0], str(README), "exec"), names)
    assert names["logits"].shape == (2, 10)
    # 64 patches, 16 fewer after each of two blocks.
    assert [site["scores"].shape for site in names["sites"]] == [(2, 64), (2, 48)]
    assert [site["auxiliary"].shape for site in names["sites"]] == [(2, 1, 10)] * 2
    # The second block goes on where the first ended.
    exec(compile(blocks[1], str(README), "exec"), names)
    assert names["logits"].shape == (1, 10)
    assert names["out"]["pruned_after"].shape == (1, 4, 4)
    # Prefix 1, R 3 and LLF: 4 and 3 of 16 patches go after the first two of four blocks.
    assert [(names["out"]["pruned_after"] == block).sum() for block in (0, 1, 2)] == [9, 4, 3]
    assert capsys.readouterr().out.count("[") >= 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
def test_train_load_predict(tmp_path, monkeypatch):
    """The third block, with two steps on made-up images, and another picture."""
    block = python_blocks(README.read_text())[2]
    assert len([line for line in block.splitlines() if line]) == 6
    Image.fromarray(np.full((20, 30, 3), 90, np.uint8)).save(tmp_path / "cat.jpg")
    config = str(REPOSITORY / "configs" / "digits.py:runlocal")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "readme"}
    exec(block.replace("configs/digits.py", config), names)
    assert names["logits"].shape == (1, 10) and names["out"]["pruned_after"].shape == (1, 8, 8)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing
