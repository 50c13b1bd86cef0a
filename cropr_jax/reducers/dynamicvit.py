"""DynamicViT: a small network decides which patches stay; masked in training, removed after it."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from cropr_jax.core import rng
from cropr_jax.core.layers import LayerNorm, gelu, normal_init
from cropr_jax.core.reducer import Context, Criterion, Prediction, Pruner, SiteSizes
from cropr_jax.reducers.distillation import divergence, squared_error
from cropr_jax.tokens import Tokens

# Keeps the mean of no tokens at all finite.
TINY = 1e-6
# Channel of the predictor's two that stands for keeping. The paper numbers them the other way.
KEEP = 0
# How the tokens that stay to the end are compared with the teacher's.
TOKEN_LOSSES = {"mse": squared_error, "kl": divergence}


def straight_through(
    log_p: Float[Array, "b m 2"], noise: Float[Array, "b m 2"]
) -> Float[Array, "b m"]:
    """1 where a token is drawn to stay, 0 elsewhere, with the gradient of the soft decision.

    Gumbel-softmax at temperature 1 (Jang et al. 2017).

    Args:
      log_p: log-probabilities.
      noise: standard Gumbel.
    """
    soft = nn.softmax(log_p + noise, axis=-1)[..., KEEP]
    hard = (soft >= 0.5).astype(jnp.float32)
    return soft + jax.lax.stop_gradient(hard - soft)


class Predictor(nn.Module):
    """Log-probabilities of keeping and dropping, from each token and the mean of those still kept.

    In float32 whatever the compute dtype: these are scores. Layer-norm epsilon 1e-5, as released.
    """

    @nn.compact
    def __call__(
        self, x: Float[Array, "b m d"], kept: Float[Array, "b m"]
    ) -> Float[Array, "b m 2"]:
        width = x.shape[-1]

        def dense(x: jax.Array, features: int, name: str) -> jax.Array:
            return nn.Dense(features, kernel_init=normal_init, name=name)(x)

        x = LayerNorm(epsilon=1e-5, name="norm")(x.astype(jnp.float32))
        local, every = jnp.split(gelu(dense(x, width, "embed")), [width // 2], axis=-1)
        total = jnp.einsum("bmd,bm->bd", every, kept)
        mean = total / jnp.maximum(kept.sum(1, keepdims=True), TINY)
        mean = jnp.broadcast_to(mean[:, None], every.shape)
        x = jnp.concatenate([local, mean], axis=-1)
        x = gelu(dense(x, width // 2, "fc1"))
        x = gelu(dense(x, width // 4, "fc2"))
        return nn.log_softmax(dense(x, 2, "fc3"), axis=-1)


class DynamicViT(Pruner):
    """Prunes what its predictor gives the lowest probability of being kept, after the block.

    In training no token is removed: decisions are drawn, and what was dropped is hidden from all
    other tokens in later attention (`attention.attend_masked`) and in pooling, so that the gradient
    of the main loss tells what a dropped token would have been worth. A dropped token stays
    dropped. The share that is kept is pulled to the schedule's by the ratio loss. In inference a
    fixed number is removed, the same for every image.

    Source: Rao et al., "DynamicViT: Efficient Vision Transformers with Dynamic Token
    Sparsification", NeurIPS 2021; raoyongming/DynamicViT: models/dyvit.py, losses.py.

    Attributes:
      ratio_weight: of the ratio loss; 2 in the paper, 5 in the authors' recipe for DeiT-B.
      distill: learn from a teacher too, as the paper does: its logits, and its tokens where the
        student keeps them to the end.
      distill_weight: of both of these losses.
      token_loss: 'mse', or 'kl' of a softmax over channels, as the authors have it for LV-ViT.
    """

    ratio_weight: float = 2.0
    distill: bool = False
    distill_weight: float = 0.5
    token_loss: str = "mse"

    @property
    def needs(self) -> frozenset[str]:
        if self.token_loss not in TOKEN_LOSSES:
            raise ValueError(
                f"dynamicvit token_loss: found {self.token_loss!r}, expected one of "
                f"{tuple(TOKEN_LOSSES)}"
            )
        return frozenset()

    @property
    def needs_teacher(self) -> bool:
        return self.distill

    @property
    def describe_losses(self) -> str:
        ratio = f"{self.ratio_weight:g} x ratio"
        if not self.distill:
            return ratio
        return f"{ratio}, {self.distill_weight:g} x (KL of logits, {self.token_loss} of tokens)"

    @property
    def refuses_fusion(self) -> str:
        return "only masks in training, where what it drops goes through all blocks"

    def macs(self, sizes: SiteSizes) -> tuple[int, int]:
        """The four layers of the predictor."""
        width, half, quarter = sizes.width, sizes.width // 2, sizes.width // 4
        layers = width * width + width * half + half * quarter + quarter * 2
        return sizes.patches * layers, 0

    @nn.compact
    def score(
        self, tokens: Tokens, context: Context, train: bool
    ) -> tuple[Float[Array, "b m"], dict[str, Any]]:
        """Log-probability of being kept."""
        kept = jnp.ones(tokens.index.shape, jnp.float32)
        if tokens.policy is not None:
            kept = tokens.policy[:, tokens.prefix :]
        x = tokens.x[:, tokens.prefix :]
        log_p = Predictor(name="predictor")(x, kept)
        return log_p[..., KEEP], {"log_p": log_p, "kept": kept}

    def __call__(
        self, tokens: Tokens, context: Context, *, keep: int, train: bool
    ) -> tuple[Tokens, Tokens | None, dict[str, Any]]:
        """Removes tokens, or in training masks them.

        Args:
          tokens: p + m tokens, in training with the `policy` of the sites before.
          context: in training with keys.
          keep: patch tokens that stay; a static int, of which the target share follows.
          train: whether to mask.

        Returns:
          As every pruner, with `log_p` [b, m, 2]. In training all tokens with a `policy`, None, and
          also `ratio`, the weighted squared distance to the target.
        """
        if not train:
            return super().__call__(tokens, context, keep=keep, train=train)
        _, out = self.score(tokens, context, train)
        keys = context.require_keys("reduction='dynamicvit' in training")
        noise = rng.gumbel(keys, out["log_p"].shape[1:])
        kept = out["kept"] * straight_through(out["log_p"], noise)
        target = keep / (tokens.grid[0] * tokens.grid[1])
        ratio = self.ratio_weight * ((kept.mean(1) - target) ** 2).mean()
        policy = jnp.pad(kept, ((0, 0), (tokens.prefix, 0)), constant_values=1.0)
        return tokens.replace(policy=policy), None, out | {"kept": kept, "ratio": ratio}

    @staticmethod
    def losses(outs: Sequence[Mapping[str, Any]], criterion: Criterion) -> dict[str, jax.Array]:
        return {"ratio": jnp.stack([out["ratio"] for out in outs]).mean()} if outs else {}

    def distillation(self, student: Prediction, teacher: Prediction) -> dict[str, jax.Array]:
        """KL of the logits, and the error of the tokens that the last site left.

        That of tokens is a mean over those of all images together: an image that keeps more of them
        weighs more. Decisions get no gradient from it, only features do.
        """
        (logits, out), (taught, whole) = student, teacher
        kept = (out["sites"][-1]["kept"] > 0.5).astype(jnp.float32)
        errors = TOKEN_LOSSES[self.token_loss](out["normed"], whole["normed"])
        tokens = (kept * errors).sum() / jnp.maximum(kept.sum(), 1.0)
        losses = {"logits": divergence(logits, taught).mean(), "tokens": tokens}
        return {f"distill_{name}": self.distill_weight * x for name, x in losses.items()}
