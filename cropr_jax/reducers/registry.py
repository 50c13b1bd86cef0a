"""Token reduction methods by the name that configs use, and their options."""

import dataclasses
from typing import Any

from cropr_jax.core.reducer import Reducer
from cropr_jax.cropr import Cropr, NonSalient
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
