"""Trees of parameters: flat names, counts, and which of them belong to a site."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import traverse_util

# Parameters of site i stand under this name and its number.
SITE = "reducer_"


def flatten(params: Mapping[str, Any]) -> dict[str, Any]:
    """Nested parameters to `{'a/b': leaf}`."""
    return traverse_util.flatten_dict(dict(params), sep="/")


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `flatten`."""
    return traverse_util.unflatten_dict(dict(flat), sep="/")


def count(params: Any) -> int:
    """Number of parameters in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def site_name(site: int) -> str:
    """The name under which the parameters of a site (from 0) stand."""
    return f"{SITE}{site}"


def of_site(name: str) -> bool:
    """Whether a '/'-joined name is that of a site's parameter."""
    return name.startswith(SITE)
