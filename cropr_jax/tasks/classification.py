"""Classification: targets, main and auxiliary loss, accuracy.

Letters: b images, n queries, c classes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cropr_jax.models.vit import ViT

Sums = dict[str, jax.Array]

BEST = "top1"


def cross_entropy(
    logits: Float[Array, "*b c"], targets: Float[Array, "*b c"]
) -> Float[Array, "*b"]:
    """Soft-target cross-entropy of each row, in float32."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.sum(targets * log_p, axis=-1)


def criterion(
    logits: Float[Array, "b n c"], places: Int[Array, "b n"] | None, targets: Float[Array, "b c"]
) -> Float[Array, ""]:
    """Loss of an auxiliary head; with several queries each of them predicts the class.

    Args:
      logits: of every query.
      places: ignored, the class is that of the whole image.
      targets: distribution over the classes.
    """
    del places
    return cross_entropy(logits, jnp.broadcast_to(targets[:, None], logits.shape)).mean()


def losses(
    logits: Float[Array, "b c"],
    extra: Mapping[str, Float[Array, ""]],
    targets: Float[Array, "b c"],
) -> tuple[Float[Array, ""], Sums]:
    """Main loss plus every loss of the reducers, weight 1 each.

    All are on the same (mixed, smoothed) targets. Source: `benbergner/cropr: cls/engine.py`.

    Args:
      logits: of the main head.
      extra: losses of the reducers (`ViT.reducer_losses`).
      targets: distribution over the classes.

    Returns:
      The sum that is minimised, and the parts: `main_loss`, and `auxiliary_loss`, the mean of the
      others.
    """
    return total(cross_entropy(logits, targets).mean(), extra)


def total(
    main: Float[Array, ""], extra: Mapping[str, Float[Array, ""]]
) -> tuple[Float[Array, ""], Sums]:
    """The plain sum of all losses, and its parts as `losses` returns them."""
    metrics = {"main_loss": main}
    if not extra:
        return main, metrics
    added = jnp.stack(list(extra.values())).sum()
    metrics["auxiliary_loss"] = added / len(extra)
    return main + added, metrics


def predicted_targets(logits: Float[Array, "b c"], model: ViT) -> Float[Array, "b c"]:
    """Targets that stand for the labels: what a model predicts, as probabilities in float32."""
    del model
    return jax.nn.softmax(logits.astype(jnp.float32), axis=-1)


def rank_of_label(logits: Float[Array, "b c"], labels: Int[Array, "b"]) -> Int[Array, "b"]:
    """Classes that come before the label: 0 where it is the prediction.

    Of equal logits the lower class comes first, as with argmax. A row with a NaN ranks its label
    last: a broken model must not be counted as right.
    """
    own = jnp.take_along_axis(logits, labels[:, None], axis=1)
    classes = jnp.arange(logits.shape[1])[None, :]
    before = (logits > own) | ((logits == own) & (classes < labels[:, None]))
    broken = jnp.isnan(logits).any(axis=1)
    return jnp.where(broken, logits.shape[1], before.sum(axis=1))


def predict(model: Callable[..., jax.Array], batch: Mapping[str, jax.Array]) -> jax.Array:
    """Logits of an evaluation batch.

    Args:
      model: images [b, height, width, 3] -> logits.
      batch: with `image`.
    """
    return model(batch["image"])


def evaluation_sums(logits: Float[Array, "b c"], batch: Mapping[str, jax.Array]) -> Sums:
    """Sums over the real examples of a batch: count, right ones, loss.

    Counts are integers, so that they are exact however the examples are cut into batches.

    Args:
      logits: of the main head.
      batch: `label` int [b], and `mask`, 0 for examples that only fill the batch.
    """
    labels, mask = batch["label"], batch["mask"] > 0
    rank = rank_of_label(logits, labels)
    targets = jax.nn.one_hot(labels, logits.shape[1], dtype=jnp.float32)
    loss = jnp.where(mask, cross_entropy(logits, targets), 0.0)
    return {
        "count": mask.sum(dtype=jnp.int32),
        "top1": (mask & (rank < 1)).sum(dtype=jnp.int32),
        "top5": (mask & (rank < 5)).sum(dtype=jnp.int32),
        "loss": loss.sum(),
    }


def summarize(batches: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Fractions and mean loss over all batches of a split.

    Args:
      batches: sums of `evaluation_sums`, on the host.

    Raises:
      ValueError: if no example was counted.
    """
    count = sum(int(sums["count"]) for sums in batches)
    if not count:
        raise ValueError("evaluation saw no example: the split is empty or wholly masked")
    names = ("top1", "top5", "loss")
    result = {name: sum(float(sums[name]) for sums in batches) / count for name in names}
    return {**result, "examples": count}
