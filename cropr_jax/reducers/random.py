"""Random pruning: what any scorer has to beat, at the lowest possible cost."""

from typing import ClassVar

from cropr_jax.core import rng
from cropr_jax.core.reducer import Context, Pruner
from cropr_jax.tokens import Tokens


class Random(Pruner):
    """Keeps tokens drawn uniformly, anew for every example and site (Table "cls_cmp")."""

    draws: ClassVar[bool] = True

    def score(self, tokens: Tokens, context: Context, train: bool):
        keys = context.require_keys("reduction='random'")
        return rng.uniform(keys, (tokens.patches,)), {}
