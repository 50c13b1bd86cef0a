"""What every token reduction method is: one interface, of which Cropr is one case.

Letters: b batch, p prefix tokens, m patch tokens, k kept, h heads.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int

from cropr_jax.core import routing
from cropr_jax.core.layers import Dtype
from cropr_jax.host.schema import Kind
from cropr_jax.tokens import Tokens

# What a model returns: its prediction, and everything else by name.
Prediction = tuple[Any, Mapping[str, Any]]

# The task's loss of auxiliary logits [b, n, c] that were predicted at `places` int [b, n], raster
# indices of patches; None where there are none (classification), or n queries stand for all patches
# in raster order. It holds the targets.
Criterion = Callable[[jax.Array, jax.Array | None], jax.Array]


@struct.dataclass
class Context:
    """What a site may read beside the tokens; what no method `needs` is None.

    Attributes:
      keys: [b] random keys, one per example, already folded with the site.
      pixels: [b, h*w, ph*pw*channels] the patches of the model input, in raster order.
      cls_row: [b, h, p+m] attention of the CLS token in the block of the site.
      col_mean: [b, p+m] mean attention that each token receives there from the patch tokens.
      col_mean_all: [b, p+m] the same, from all tokens.
      k_mean: [b, p+m, d/h] keys there, averaged over heads, before any rotation.
      v_norm: [b, h, p+m] norm of the values there.

    The last two send no gradient back: they choose tokens.
    """

    keys: Any = None
    pixels: Any = None
    cls_row: Any = None
    col_mean: Any = None
    col_mean_all: Any = None
    k_mean: Any = None
    v_norm: Any = None

    def require_keys(self, who: str) -> jax.Array:
        """The keys.

        Raises:
          ValueError: if the model was called without.
        """
        if self.keys is None:
            raise ValueError(
                f"{who} draws at random: call the model with keys=rng.example_keys(...)"
            )
        return self.keys


class SiteSizes(NamedTuple):
    """Sizes of one site, by which a method counts what it costs.

    Attributes:
      patches: m, patch tokens that enter.
      keep: k, patch tokens that leave.
      prefix: p.
      width: d.
      heads: h, of the backbone.
    """

    patches: int
    keep: int
    prefix: int
    width: int
    heads: int


class Reducer(nn.Module):
    """One site at which tokens are reduced.

    A method is a subclass: it says where it acts and what it needs, and maps tokens to kept tokens,
    pruned tokens (None for methods that merge) and a dict of outputs. It registers itself in
    `cropr_jax.reducers.registry`.

    Attributes:
      num_outputs: classes of the task, for methods with heads of their own.
      num_queries: n, for methods with learned queries.
      slim: inference form, without parameters that only training needs.
      dtype: compute dtype.

    Class attributes:
      hook: 'after' the block, or 'middle', between its attention and its MLP.
      keeps_positions: false if the tokens that leave stand for no place in the image; such a method
        works with neither rotary embeddings nor Last Layer Fusion.
      trains_alone: whether losses of its own teach its sites, so that a frozen model can be given
        them.
      draws: whether it draws at random outside training.
      untrained: options with which it has nothing to train, if by default it has.
      ranges: what options may be, where their type does not say it.
    """

    num_outputs: int = 0
    num_queries: int = 1
    slim: bool = False
    dtype: Dtype = jnp.float32

    hook: ClassVar[str] = "after"
    keeps_positions: ClassVar[bool] = True
    trains_alone: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    untrained: ClassVar[Mapping[str, Any]] = {}
    ranges: ClassVar[Mapping[str, Kind]] = {}
    # Parameters whose shape holds the number of outputs k, and on which axis: weights that are
    # trained with them serve one schedule at one image size.
    count_axes: ClassVar[Mapping[str, int]] = {}

    @property
    def needs(self) -> frozenset[str]:
        """Names of `cropr_jax.core.attention.NEEDS` that block or model compute for the site."""
        return frozenset()

    @property
    def needs_cls(self) -> bool:
        """Whether the model must have a CLS token."""
        return "cls_row" in self.needs

    @property
    def refuses_fusion(self) -> str:
        """Why Last Layer Fusion cannot work with the method; empty if it can."""
        return "" if self.keeps_positions else "keeps no positions"

    @property
    def describe_losses(self) -> str:
        """Losses of the method beside the task's, in words; empty if it has none."""
        return ""

    @property
    def needs_teacher(self) -> bool:
        """Whether training compares with a frozen, unpruned model (`distillation`)."""
        return False

    def most(self, patches: int) -> int:
        """How many of `patches` tokens one site can remove."""
        return patches - 1

    def macs(self, sizes: SiteSizes) -> tuple[int, int]:
        """What the site adds at inference for one image, in multiply-accumulates.

        Returns:
          Those of linear layers, and those of products of tokens with tokens. Scores of one dot
          product a token count as nothing, as every operation per channel.
        """
        return 0, 0

    def __call__(
        self, tokens: Tokens, context: Context, *, keep: int, train: bool
    ) -> tuple[Tokens, Tokens | None, dict[str, Any]]:
        raise NotImplementedError(f"{type(self).__name__} defines no __call__")

    @staticmethod
    def losses(outs: Sequence[Mapping[str, Any]], criterion: Criterion) -> dict[str, jax.Array]:
        """Losses of all sites, by name; the training loss is their plain sum with the main loss.

        Args:
          outs: what each site returned.
          criterion: the task's loss of one site.
        """
        return {
            f"auxiliary_{site + 1}": criterion(out["auxiliary"], out.get("places"))
            for site, out in enumerate(outs)
            if "auxiliary" in out
        }

    def recover(self, tokens: Tokens, block: int) -> Float[Array, "b g d"] | None:
        """Patch tokens brought back to all g places of the image, in training.

        The site is asked at every block from its own to the one before the next site's, for
        methods that compare them with a teacher's.

        Args:
          tokens: that leave the block and its site.
          block: from 0.
        """
        return None

    def distillation(self, student: Prediction, teacher: Prediction) -> dict[str, jax.Array]:
        """Losses between model and teacher, by name and weighted; added to all others.

        Args:
          student: what the model returned in training.
          teacher: what the frozen, unpruned model returned for the same images.
        """
        return {}

    @classmethod
    def slim_params(cls, params: dict[str, Any]) -> dict[str, Any]:
        """The parameters that the slim form keeps: all of them unless a method says otherwise."""
        return params


class Pruner(Reducer):
    """A reducer that keeps some patch tokens as they are and hands back the others.

    By default those of the highest `score` are kept; a method may define `order` instead.
    """

    def score(
        self, tokens: Tokens, context: Context, train: bool
    ) -> tuple[Float[Array, "b m"], dict[str, Any]]:
        """Float32 scores of the patch tokens, and further outputs of the site."""
        raise NotImplementedError(f"{type(self).__name__} defines no score")

    def order(
        self, tokens: Tokens, context: Context, keep: int, train: bool
    ) -> tuple[Int[Array, "b m"], dict[str, Any]]:
        """Positions of the patch tokens, the `keep` that stay in front, and further outputs."""
        scores, out = self.score(tokens, context, train)
        return routing.rank(jax.lax.stop_gradient(scores)), out

    def __call__(
        self, tokens: Tokens, context: Context, *, keep: int, train: bool
    ) -> tuple[Tokens, Tokens | None, dict[str, Any]]:
        """Splits the tokens.

        Args:
          tokens: p + m tokens.
          context: what `needs` asked for.
          keep: patch tokens to keep; a static int.
          train: whether training-only branches run.

        Returns:
          Kept tokens in descending order of score, pruned tokens likewise, outputs.
        """
        order, out = self.order(tokens, context, keep, train)
        kept, pruned = routing.split(tokens, order, keep)
        return kept, pruned, out
