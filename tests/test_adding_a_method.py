"""The page on adding a method is followed to the letter, and what it adds passes the battery."""

import inspect
import re
import sys
import types
from pathlib import Path

import pytest
from conftest import REPOSITORY
from reducers import test_battery

from cropr_jax import models
from cropr_jax.bench import untrained
from cropr_jax.reducers.registry import REDUCERS

PAGE = (REPOSITORY / "docs" / "adding_a_method.md").read_text()
NAME = "largest_norm"
# By name, all of the battery that is about one method.
BATTERY = {
    name: test
    for name, test in vars(test_battery).items()
    if name.startswith("test_") and list(inspect.signature(test).parameters) == ["name"]
}


@pytest.fixture
def method(monkeypatch):
    """The page's file, saved and registered as it says; and its second block, the test."""
    file, own_test = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    module = types.ModuleType(f"cropr_jax.reducers.{NAME}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(file, "largest_norm.py", "exec"), vars(module))
    monkeypatch.setitem(REDUCERS, NAME, module.LargestNorm)
    return own_test


def test_its_own_test(method):
    names = {}
    exec(compile(method, "test_largest_norm.py", "exec"), names)
    names["test_the_longest_stay"]()


@pytest.mark.parametrize("check", sorted(BATTERY))
def test_battery(method, check):
    BATTERY[check](NAME)


def test_off_the_shelf_takes_it_and_its_opposite(method):
    fields = {"width": 8, "depth": 2, "heads": 2, "patch": 4, "image_size": 16, "num_classes": 3}
    assert {NAME, f"{NAME}_inverse"} < set(untrained.parameter_free(fields))


def test_an_option_may_be_a_list(method, monkeypatch):
    """As it is in a config read back from JSON."""

    class Weighted(REDUCERS[NAME]):
        weights: tuple[float, ...] = ()

    monkeypatch.setitem(REDUCERS, "weighted", Weighted)
    reduction = {"name": "weighted", "rate": 1, "fusion": "none", "options": {"weights": [1, 2]}}
    fields = {"width": 8, "depth": 2, "heads": 2, "patch": 4, "image_size": 16, "num_classes": 3}
    model = models.create(fields | {"reduction": reduction})
    assert model.make_reducer().weights == (1, 2)
    assert models.count(models.abstract_params(model)) > 0


def test_what_the_page_says_of_the_repository():
    lines = int(re.search(r"No method there is\s+longer than (\d+) lines", PAGE)[1])
    folder = REPOSITORY / "cropr_jax" / "reducers"
    for method in REDUCERS.values():
        file = Path(inspect.getfile(method))
        assert file.parent != folder or len(file.read_text().splitlines()) <= lines, file.name
    named = set(re.findall(r"`(\w+\.py)`", PAGE.partition("## If it is more")[2]))
    for name in named:
        assert (folder / name).exists() or (folder.parent / name).exists(), name
    for path in re.findall(r"`((?:tests|cropr_jax|configs)/[\w/.]+)`", PAGE):
        assert (REPOSITORY / path).exists() or NAME in path, path
    assert BATTERY
