"""Token reduction methods by the name that configs use, and their options."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Mapping
from typing import Any

from cropr_jax.core.reducer import Reducer
from cropr_jax.cropr import Cropr, NonSalient
from cropr_jax.host import schema
from cropr_jax.host.schema import Field, Kind
from cropr_jax.reducers.ats import ATS
from cropr_jax.reducers.attn_topk import AttnTopK
from cropr_jax.reducers.dpc_knn import DPCKNN
from cropr_jax.reducers.dtop import DToP
from cropr_jax.reducers.dynamicvit import DynamicViT
from cropr_jax.reducers.evit import EViT
from cropr_jax.reducers.kmedoids import KMedoids
from cropr_jax.reducers.patchmerger import PatchMerger
from cropr_jax.reducers.random import Random
from cropr_jax.reducers.sinkhorn import Sinkhorn
from cropr_jax.reducers.sit import SiT
from cropr_jax.reducers.tome import ToMe
from cropr_jax.reducers.variance import Variance

# 'none' is no method but the unpruned model, which has no sites.
REDUCERS: dict[str, type[Reducer]] = {
    "ats": ATS,
    "attn_topk": AttnTopK,
    "cropr": Cropr,
    "dpc_knn": DPCKNN,
    "dynamicvit": DynamicViT,
    "evit": EViT,
    "kmedoids": KMedoids,
    "non_salient": NonSalient,
    "patchmerger": PatchMerger,
    "random": Random,
    "sinkhorn": Sinkhorn,
    "sit": SiT,
    "tome": ToMe,
    "variance": Variance,
}
# Methods that are no choice of their own: a fusion of that name brings them along.
OF_FUSIONS: dict[str, type[Reducer]] = {"dtop": DToP}


def method(name: str) -> type[Reducer]:
    """The method of a model, by its attribute `reduction`."""
    return (REDUCERS | OF_FUSIONS)[name]


def options(name: str) -> dict[str, Any]:
    """Options of a method and their defaults: the fields of its class that it adds to `Reducer`."""
    shared = {field.name for field in dataclasses.fields(Reducer)}
    return {
        field.name: field.default
        for field in dataclasses.fields(method(name))
        if field.name not in shared
    }


def option_fields(name: str) -> dict[str, Field]:
    """The options of a method as fields of a config: kinds by type or `Reducer.ranges`."""
    ranges, said = method(name).ranges, meanings(name)
    return {
        option: Field(ranges.get(option) or _kind(default), said.get(option, "of the method"))
        for option, default in options(name).items()
    }


def _kind(default: Any) -> Kind:
    """What may stand for a default of its type."""
    kinds = {bool: schema.FLAG, int: schema.whole(0, 2**20), float: schema.number(0, 1e6)}
    return kinds.get(type(default), schema.TEXT if isinstance(default, str) else schema.ANYTHING)


def meanings(name: str) -> dict[str, str]:
    """What the docstrings of a method's class, and of those it inherits from, say of attributes."""
    return dict(_said(method(name)))


@functools.cache
def _said(of: type[Reducer]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for kind in of.__mro__:
        text = inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:\n")[2]
        for names, meaning in re.findall(r"^  ([\w, ]+): (.*(?:\n    .*)*)", text, re.MULTILINE):
            for attribute in names.split(", "):
                found.setdefault(attribute, " ".join(meaning.split()))
    return found
