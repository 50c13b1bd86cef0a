"""Token Cropr: cross-attention pruning, the paper's module in one file.

A site holds a *router*, the *scorer* and the Top-K *selector*, which stays at inference, and an
*aggregator* and *auxiliary head*, which teach the scorer and are gone at inference. Nothing of a
site sends a gradient into the backbone: its input passes a stop-gradient.

Letters: b batch, p prefix tokens, m patch tokens, t = p + m, n queries, d width, c classes, g heads
of the multi-head ablation (1 otherwise). Queries [n, d] are those of all examples, [b, n, d] each
example's own.

Source: Bergner, Lippert and Mahendran, "Token Cropr: Faster ViTs for Quite a Few Tasks", section
"Module description"; numbers follow benbergner/cropr: cls/cropr.py.
"""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import linen as nn
from jaxtyping import Array, Float, Int, Key

from cropr_jax.core import rng, routing
from cropr_jax.core.layers import Dtype, LayerNorm, Mlp, normal_init
from cropr_jax.core.reducer import Context, Pruner, SiteSizes
from cropr_jax.host.schema import Kind, choice, whole
from cropr_jax.tokens import Tokens

# Folded into a site's key for the choice of the queries that train.
QUERIES_KEY = 0


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


def draw_queries(keys: Key[Array, "b"], total: int, count: int) -> Int[Array, "b n"]:
    """Which `count` of `total` queries each example trains, drawn uniformly, none twice."""
    return routing.rank(rng.uniform(keys, (total,)))[:, :count]


def cross_attention(
    queries: Float[Array, "*b n g k"], keys: Float[Array, "b t g k"]
) -> Float[Array, "b g n t"]:
    """Attention matrix A = Q K^T (Eq. 3) per head, in float32 and not scaled."""
    names = "ngk" if queries.ndim == 3 else "bngk"
    return jnp.einsum(f"{names},btgk->bgnt", queries, keys, preferred_element_type=jnp.float32)


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
      projections, pre_norm: the multi-head design of Table "cross-attn"; the paper's own has
        neither projections nor a norm. (Scores are sums over heads, so that here they are one.)
      sum_first: see `Cropr`.
      slim: the inference form, one vector and, with `pre_norm`, the norm.
      dtype: compute dtype of the norm and the key projection.
    """

    num_queries: int = 1
    projections: bool = False
    pre_norm: bool = False
    sum_first: bool = True
    slim: bool = False
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "b t d"]
    ) -> tuple[
        Float[Array, "b t"],
        Float[Array, "n d"] | None,
        Float[Array, "b t d"],
        Float[Array, "b t d"],
    ]:
        """Returns scores, queries (None of the slim form), keys, and the tokens as scored."""
        if self.pre_norm:
            x = LayerNorm(dtype=self.dtype, name="norm")(x)
        width = x.shape[-1]
        if self.slim:
            return score_tokens(self.param("query", queries_init, (width,)), x), None, x, x

        queries = self.param("queries", queries_init, (self.num_queries, width))
        keys = x
        if self.projections:
            dense = {"use_bias": False, "kernel_init": normal_init}
            queries = nn.Dense(width, name="query", **dense)(queries)
            keys = nn.Dense(width, dtype=self.dtype, name="key", **dense)(x)
        if self.sum_first:
            return score_tokens(aggregate_queries(queries), keys), queries, keys, x
        product = cross_attention(queries.astype(keys.dtype)[:, None], keys[:, :, None])
        return product.sum((1, 2)), queries, keys, x

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
      heads: of the cross-attention (Table "cross-attn"). The output projection exists with several
        heads only.
      projections: as the scorer's.
      mlp: the MLP of Table "mlp", GELU of ratio 4 on every backbone.
      dtype: compute dtype.
    """

    heads: int = 1
    projections: bool = False
    mlp: bool = True
    dtype: Dtype = jnp.float32

    @nn.compact
    def __call__(
        self,
        queries: Float[Array, "*b n d"],
        keys: Float[Array, "b t d"],
        x: Float[Array, "b t d"],
    ) -> Float[Array, "b n d"]:
        width = x.shape[-1]
        split = functools.partial(rearrange, pattern="... (g k) -> ... g k", g=self.heads)
        attention = cross_attention(split(queries.astype(keys.dtype)), split(keys))
        values = x
        if self.projections:
            values = nn.Dense(
                width, use_bias=False, dtype=self.dtype, kernel_init=normal_init, name="value"
            )(x)
        z = aggregate(attention, split(values))
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
      train_queries: of how many queries each example runs the auxiliary branch in a step, drawn at
        random, 0 for all; a cheaper form of training with many queries (ours). Scores are those of
        all queries whatever it is.
      sum_first: false to score by Q K^T, summed afterwards, as the released code does: the form of
        section "Efficient inference" that the slim one is compared with.
      remat: recompute the auxiliary branch in the backward pass, so that of all sites' branches one
        at a time is in memory.
    """

    heads: int = 1
    projections: bool = False
    pre_norm: bool = False
    mlp: bool = True
    stop_gradient: bool = True
    selector: str = "topk"
    sample_in_eval: bool = False
    train_queries: int = 0
    sum_first: bool = True
    remat: bool = False

    trains_alone: ClassVar[bool] = True
    ranges: ClassVar[Mapping[str, Kind]] = {
        "heads": whole(1, 2**10),
        "selector": choice("topk", "sample"),
    }
    salience: ClassVar[float] = 1.0

    @property
    def describe_losses(self) -> str:
        return "auxiliary loss of each site"

    @property
    def needs(self) -> frozenset[str]:
        if not 0 <= self.train_queries <= self.num_queries:
            raise ValueError(
                f"train_queries: found {self.train_queries}, expected 1 to {self.num_queries}, the "
                "number of queries, or 0 for all of them"
            )
        return frozenset()

    def macs(self, sizes: SiteSizes) -> tuple[int, int]:
        """Nothing in the slim form; else projections of tokens and queries, or their product."""
        if self.slim:
            return 0, 0
        tokens = sizes.prefix + sizes.patches
        linear = (tokens + self.num_queries) * sizes.width**2 if self.projections else 0
        return linear, 0 if self.sum_first else self.num_queries * tokens * sizes.width

    @nn.compact
    def score(
        self, tokens: Tokens, context: Context, train: bool
    ) -> tuple[Float[Array, "b m"], dict[str, jax.Array]]:
        x = jax.lax.stop_gradient(tokens.x) if self.stop_gradient else tokens.x
        scorer = Scorer(
            self.num_queries,
            self.projections,
            self.pre_norm,
            self.sum_first,
            self.slim,
            self.dtype,
            name="scorer",
        )
        scores, queries, keys, x = scorer(x)
        out = {"scores": scores[:, tokens.prefix :]}
        if train and queries is not None:
            if self.train_queries:
                drawn = rng.fold(context.require_keys("train_queries"), QUERIES_KEY)
                out["places"] = draw_queries(drawn, self.num_queries, self.train_queries)
                queries = queries[out["places"]]
            predict = nn.remat(Cropr.predict) if self.remat else Cropr.predict
            out["auxiliary"] = predict(self, queries, keys, x)
        return self.select(out["scores"], context, train, tokens.x.shape[-1]), out

    def predict(
        self,
        queries: Float[Array, "*b n d"],
        keys: Float[Array, "b t d"],
        x: Float[Array, "b t d"],
    ) -> Float[Array, "b n c"]:
        """The auxiliary branch: logits of every query."""
        aggregator = Aggregator(
            self.heads, self.projections, self.mlp, self.dtype, name="aggregator"
        )
        head = AuxiliaryHead(self.num_outputs, self.dtype, name="auxiliary_head")
        return head(aggregator(queries, keys, x))

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
