"""Token Cropr: cross-attention pruning, the paper's module in one file.

A site holds a *router*, the *scorer* and the Top-K *selector*, which stays at inference, and an
*aggregator* and *auxiliary head*, which teach the scorer and are gone at inference. Nothing of a
site sends a gradient into the backbone: its input passes a stop-gradient.

Letters: b batch, p prefix tokens, m patch tokens, t = p + m, n queries, d width, c classes, g heads
of the multi-head ablation (1 otherwise).

Source: Bergner, Lippert and Mahendran, "Token Cropr: Faster ViTs for Quite a Few Tasks", section
"Module description"; numbers follow benbergner/cropr: cls/cropr.py.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import linen as nn
from jaxtyping import Array, Float

from cropr_jax import rng
from cropr_jax.layers import Dtype, LayerNorm, Mlp, normal_init
from cropr_jax.reducers.base import Context, Pruner, SiteSizes
from cropr_jax.tokens import Tokens


def aggregate_queries(queries: Float[Array, "n d"]) -> Float[Array, "d"]:
    """The one vector that replaces all queries: q = sum over n of Q_n, in float32.

    Section "Efficient inference": the sum over queries moves inside the product, which then costs
    O(M) instead of O(N M).
    """
    return queries.astype(jnp.float32).sum(0)


def score_tokens(query: Float[Array, "d"], keys: Float[Array, "b m d"]) -> Float[Array, "b m"]:
    """Scores a = q K^T, Eq. 4 with the queries summed first.

    Always in float32: in bfloat16 scores tie, and ties would decide what is pruned. Not divided by
    the square root of d, which changes no ranking.
    """
    return jnp.einsum(
        "bmd,d->bm", keys.astype(jnp.float32), query, precision=jax.lax.Precision.HIGHEST
    )


def cross_attention(
    queries: Float[Array, "n g k"], keys: Float[Array, "b t g k"]
) -> Float[Array, "b g n t"]:
    """Attention matrix A = Q K^T (Eq. 3) per head, in float32 and not scaled."""
    return jnp.einsum("ngk,btgk->bgnt", queries, keys, preferred_element_type=jnp.float32)


def aggregate(
    attention: Float[Array, "b g n t"], values: Float[Array, "b t g k"]
) -> Float[Array, "b n d"]:
    """Weighted averages X' = softmax(A / sqrt(d)) X of all tokens, the prefix included."""
    weights = nn.softmax(attention * values.shape[-1] ** -0.5, axis=-1).astype(values.dtype)
    return rearrange(jnp.einsum("bgnt,btgk->bngk", weights, values), "b n g k -> b n (g k)")


def queries_init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Normal of std d^-0.5, cut at two standard deviations (so of std 0.88 d^-0.5)."""
    return jax.random.truncated_normal(key, -2, 2, shape, dtype) * shape[-1] ** -0.5


class Scorer(nn.Module):
    """Learned queries that score the tokens.

    Attributes:
      num_queries: n.
      heads, projections, pre_norm: the multi-head design of Table "cross-attn"; the paper's own has
        one head and neither projections nor a norm.
      slim: the inference form, one vector and, with `pre_norm`, the norm.
      dtype: compute dtype of the norm and the key projection.
    """

    num_queries: int = 1
    heads: int = 1
    projections: bool = False
    pre_norm: bool = False
    slim: bool = False
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "b t d"], attend: bool
    ) -> tuple[Float[Array, "b t"], Float[Array, "b g n t"] | None, Float[Array, "b t d"]]:
        """Returns scores, the attention matrix if `attend`, and the tokens as they were scored."""
        if self.pre_norm:
            x = LayerNorm(dtype=self.dtype, name="norm")(x)
        width = x.shape[-1]
        if self.slim:
            return score_tokens(self.param("query", queries_init, (width,)), x), None, x

        queries = self.param("queries", queries_init, (self.num_queries, width))
        keys = x
        if self.projections:
            dense = {"use_bias": False, "kernel_init": normal_init}
            queries = nn.Dense(width, name="query", **dense)(queries)
            keys = nn.Dense(width, dtype=self.dtype, name="key", **dense)(x)
        scores = score_tokens(aggregate_queries(queries), keys)
        if not attend:
            return scores, None, x
        split = "{} (g k) -> {} g k"
        attention = cross_attention(
            rearrange(queries.astype(keys.dtype), split.format("n", "n"), g=self.heads),
            rearrange(keys, split.format("b t", "b t"), g=self.heads),
        )
        return scores, attention, x

    @staticmethod
    def slim_params(params: dict[str, Any]) -> dict[str, Any]:
        """The parameters of the inference form.

        Without projections this is the sum of the queries. With them, the key projection moves to
        the other side of the product: (W_q Q) (W_k x)^T = (W_k^T W_q Q) x^T.
        """
        queries = jnp.asarray(params["queries"])
        if "query" in params:
            queries = queries @ params["query"]["kernel"]
        query = aggregate_queries(queries)
        if "key" in params:
            query = params["key"]["kernel"].astype(jnp.float32) @ query
        slim = {"query": query}
        return slim | {"norm": params["norm"]} if "norm" in params else slim


class Aggregator(nn.Module):
    """Aggregated tokens MLP(LN(X')) + X', Eq. 5.

    Attributes:
      heads, projections: as the scorer's. The output projection exists with several heads only.
      mlp: the MLP of Table "mlp", GELU of ratio 4 on every backbone.
      dtype: compute dtype.
    """

    heads: int = 1
    projections: bool = False
    mlp: bool = True
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self, attention: Float[Array, "b g n t"], x: Float[Array, "b t d"]
    ) -> Float[Array, "b n d"]:
        width = x.shape[-1]
        values = x
        if self.projections:
            values = nn.Dense(
                width, use_bias=False, dtype=self.dtype, kernel_init=normal_init, name="value"
            )(x)
        z = aggregate(attention, rearrange(values, "b t (g k) -> b t g k", g=self.heads))
        if self.heads > 1:
            z = nn.Dense(width, dtype=self.dtype, kernel_init=normal_init, name="out")(z)
        if self.mlp:
            normed = LayerNorm(dtype=self.dtype, name="norm")(z)
            z = z + Mlp(4 * width, kernel_init=normal_init, dtype=self.dtype, name="mlp")(normed)
        return z


class AuxiliaryHead(nn.Module):
    """LN and linear projection to logits, at every query.

    The norm's epsilon is 1e-5, PyTorch's default, unlike every other norm: as released.
    """

    num_outputs: int
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n c"]:
        x = LayerNorm(epsilon=1e-5, dtype=self.dtype, name="norm")(x)
        logits = nn.Dense(
            self.num_outputs, dtype=self.dtype, kernel_init=normal_init, name="linear"
        )(x)
        return logits.astype(jnp.float32)


class Cropr(Pruner):
    """One site of Cropr, after a block.

    Attributes:
      heads, projections, pre_norm: multi-head scorer (Table "cross-attn": 16 heads, all on).
      mlp: MLP in the aggregator (Table "mlp").
      stop_gradient: keep auxiliary gradients out of the backbone (Table "gradient mode").
      selector: 'topk', or 'sample' to draw the kept tokens without replacement from the
        cross-attention distribution (Table "selection methods").
      sample_in_eval: with 'sample', draw outside training too, rather than taking the Top-K.
    """

    heads: int = 1
    projections: bool = False
    pre_norm: bool = False
    mlp: bool = True
    stop_gradient: bool = True
    selector: str = "topk"
    sample_in_eval: bool = False

    trains_alone: ClassVar[bool] = True
    salience: ClassVar[float] = 1.0

    @property
    def describe_losses(self) -> str:
        return "auxiliary cross-entropy of each site"

    def macs(self, sizes: SiteSizes) -> tuple[int, int]:
        """Nothing, but for the projections of tokens and queries, which the slim form has not."""
        if self.slim or not self.projections:
            return 0, 0
        tokens = sizes.prefix + sizes.patches
        return (tokens + self.num_queries) * sizes.width**2, 0

    @nn.compact
    def score(
        self, tokens: Tokens, context: Context, train: bool
    ) -> tuple[Float[Array, "b m"], dict[str, jax.Array]]:
        x = jax.lax.stop_gradient(tokens.x) if self.stop_gradient else tokens.x
        scorer = Scorer(
            self.num_queries,
            self.heads,
            self.projections,
            self.pre_norm,
            self.slim,
            self.dtype,
            name="scorer",
        )
        scores, attention, x = scorer(x, attend=train)
        out = {"scores": scores[:, tokens.prefix :]}
        if attention is not None:
            aggregator = Aggregator(
                self.heads, self.projections, self.mlp, self.dtype, name="aggregator"
            )
            head = AuxiliaryHead(self.num_outputs, self.dtype, name="auxiliary_head")
            out["auxiliary"] = head(aggregator(attention, x))
        return self.select(out["scores"], context, train, tokens.x.shape[-1]), out

    def select(
        self, scores: Float[Array, "b m"], context: Context, train: bool, width: int
    ) -> Float[Array, "b m"]:
        """What the selector ranks by: the scores, or scores perturbed so that Top-K samples.

        Gumbel noise on log-probabilities turns Top-K into sampling without replacement. With
        several queries and heads the distribution is the geometric mean of theirs, each softmax
        with the scale that it has in `aggregate`.

        Raises:
          ValueError: on an unknown `selector`, or if sampling has no keys.
        """
        if self.selector not in ("topk", "sample"):
            raise ValueError(f"selector: found {self.selector!r}, expected 'topk' or 'sample'")
        if self.selector == "topk" or not (train or self.sample_in_eval):
            return self.salience * scores
        scale = (width / self.heads) ** 0.5 * self.num_queries * self.heads
        noise = rng.gumbel(context.require_keys("selector='sample'"), scores.shape[1:])
        return self.salience * scores / scale + noise

    @classmethod
    def slim_params(cls, params: dict[str, Any]) -> dict[str, Any]:
        return {"scorer": Scorer.slim_params(params["scorer"])}


class NonSalient(Cropr):
    """Cropr with the selector inverted, in training too: prunes the highest scores.

    Table "cls_cmp": a lower bound that shows that scores carry task relevance.
    """

    salience: ClassVar[float] = -1.0
