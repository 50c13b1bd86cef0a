"""Image classification: pooled features, a norm and a linear head on a Vision Transformer.

Letters: b batch, m patch tokens, d width, c classes.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import linen as nn
from jaxtyping import Array, Float, Key

from cropr_jax.core import fusion
from cropr_jax.core.layers import LayerNorm
from cropr_jax.host.messages import check_choice
from cropr_jax.models.blocks import POOLS, pool
from cropr_jax.models.trunk import Encoded, Trunk


class Classifier(Trunk):
    """A Vision Transformer that predicts the class of an image.

    Logits [b, c]; with `num_classes` 0 the features that the head would see.

    Attributes:
      pool: see `cropr_jax.models.blocks.pool`; 'cls' normalises before pooling (`norm`), the others
        after (`fc_norm`).
    """

    pool: str = "mean_all"

    fusions: ClassVar[tuple[str, ...]] = fusion.POOLED_FUSIONS

    @classmethod
    def check(cls, fields: dict[str, Any], grid: tuple[int, int]) -> None:
        check_choice("model.pool", fields.setdefault("pool", cls.pool), POOLS)

    @property
    def needs_cls(self) -> str:
        return f"pool {self.pool!r}" if self.pool == "cls" else ""

    @property
    def head_norm(self) -> str:
        return "norm" if self.pool == "cls" else "fc_norm"

    @nn.nowrap
    def head_macs(self) -> int:
        return self.width * self.num_classes

    def predict(
        self,
        encoded: Encoded,
        inputs: Mapping[str, jax.Array],
        *,
        train: bool,
        keys: Key[Array, "b"] | None,
    ) -> tuple[Float[Array, "b c"], dict[str, jax.Array]]:
        """Logits, and `pooled`, `normed` and `pre_logits` (see `Trunk.__call__`).

        The head sees the pooled features normalised; with pool='cls' the norm comes before pooling.
        """
        tokens = encoded.tokens
        norm = LayerNorm(dtype=self.dtype, name=self.head_norm)
        normed = norm(tokens.x)
        if self.pool == "cls":
            pooled = features = pool(tokens.replace(x=normed), self.pool)
        else:
            pooled = pool(tokens, self.pool)
            features = norm(pooled)
        out = {"normed": normed[:, self.prefix :], "pooled": pooled, "pre_logits": features}
        return self.project(features), out
