"""The page of methods and options is what the classes say, and configs show the same options."""

import importlib.util

import pytest
from conftest import REPOSITORY
from test_configs import get_config

from cropr_jax.reducers.registry import REDUCERS, options
from cropr_jax.train import fields


def test_page_is_up_to_date():
    path = REPOSITORY / "docs" / "make_methods.py"
    spec = importlib.util.spec_from_file_location("make_methods", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (REPOSITORY / "docs" / "methods.md").read_text() == module.page()


@pytest.mark.parametrize("name", sorted(REDUCERS))
def test_configs_show_every_option(name):
    config = get_config("in1k", f"vit_l,reduction={name}")
    shown = fields.plain(config.model.reduction.options)
    assert shown == fields.plain(options(name))


def test_a_new_option_needs_no_second_line(monkeypatch):
    class More(REDUCERS["random"]):
        """Draws.

        Attributes:
          strength: of the draw.
        """

        strength: float = 0.5

    monkeypatch.setitem(REDUCERS, "random", More)
    config = get_config("in1k", "vit_l,reduction=random")
    assert config.model.reduction.options.strength == 0.5
    assert fields.settled(fields.plain(config))["model"]["reduction"]["options"] == {
        "strength": 0.5
    }
