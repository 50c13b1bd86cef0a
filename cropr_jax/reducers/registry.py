"""Token reduction methods by the name that configs use."""

from cropr_jax.cropr import Cropr, NonSalient
from cropr_jax.reducers.attn_topk import AttnTopK
from cropr_jax.reducers.base import Reducer
from cropr_jax.reducers.random import Random
from cropr_jax.reducers.variance import Variance

# 'none' is no method but the unpruned model, which has no sites.
REDUCERS: dict[str, type[Reducer]] = {
    "attn_topk": AttnTopK,
    "cropr": Cropr,
    "non_salient": NonSalient,
    "random": Random,
    "variance": Variance,
}
