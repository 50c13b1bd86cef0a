"""Trees of parameters: flat names and back, counts, names of sites."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cropr_jax.core import trees

NAMES = st.text("ab_0", min_size=1, max_size=3)
TREES = st.recursive(
    st.integers(), lambda part: st.dictionaries(NAMES, part, min_size=1, max_size=3), max_leaves=8
)


@given(st.dictionaries(NAMES, TREES, max_size=3))
def test_flat_names_lead_back_to_the_tree(tree):
    flat = trees.flatten(tree)
    assert trees.unflatten(flat) == tree
    for name, leaf in flat.items():
        node = tree
        for part in name.split("/"):
            node = node[part]
        assert node == leaf and not isinstance(leaf, dict)


def test_flat_names():
    tree = {"block_0": {"attn": {"key": 1}, "norm": 2}, "cls": 3}
    assert trees.flatten(tree) == {"block_0/attn/key": 1, "block_0/norm": 2, "cls": 3}


def test_count_is_of_numbers_not_of_leaves():
    tree = {"a": np.zeros((2, 3)), "b": {"c": jax.ShapeDtypeStruct((4,), "float32")}}
    assert trees.count(tree) == 10
    assert trees.count({"scale": np.float32(1)}) == 1 and trees.count({}) == 0


@pytest.mark.parametrize("site", [0, 3, 22])
def test_parameters_of_a_site_are_told_by_their_name(site):
    assert trees.site_name(site) == f"reducer_{site}"
    assert trees.of_site(f"{trees.site_name(site)}/scorer/queries")


@pytest.mark.parametrize("name", ["cls", "block_0/mlp/fc1/kernel", "head/reducer_0", "fusion/x"])
def test_other_parameters_are_of_no_site(name):
    assert not trees.of_site(name)
