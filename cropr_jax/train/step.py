"""One training step and one evaluation step, as pure functions for `jax.jit`.

Everything random is folded from (seed, step, example or group), so devices, hosts and micro-batches
change no number but the order of sums.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from cropr_jax import rng
from cropr_jax.models.vit import ViT
from cropr_jax.reducers.distillation import Prediction
from cropr_jax.train import mixup, optimizer, sharding
from cropr_jax.train.optimizer import Flat, TrainState

Batch = dict[str, Any]  # arrays; of targets perhaps a tree of them
Metrics = dict[str, jax.Array]

# What the keys that are folded from the seed are for.
INIT_KEY, MODEL_KEY, MIXUP_KEY, EVAL_KEY = range(4)


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step is made of; all of it is fixed before tracing.

    Attributes:
      model: training form.
      task: module of `cropr_jax.tasks`.
      optimizer: transformation of flat trainable gradients.
      schedule: learning rate by step, for the log.
      trainable: names of the parameters that are trained.
      mixing: mixup, CutMix and label smoothing; None for a task whose images are not mixed.
      accum_steps: micro-batches of a step.
      ema: decay of the average of parameters, None for no average.
      seed: of the run.
      mesh: devices.
      teacher: frozen, unpruned model whose outputs the method learns from; None for no such model.
      from_model: whether its predictions are the targets, instead of the labels.
    """

    model: ViT
    task: ModuleType
    optimizer: optax.GradientTransformation
    schedule: Callable[[jax.Array], jax.Array]
    trainable: Sequence[str]
    mixing: mixup.MixupConfig | None
    accum_steps: int
    ema: float | None
    seed: int
    mesh: Mesh
    teacher: ViT | None = None
    from_model: bool = False

    def key(self, purpose: int) -> jax.Array:
        """Key of the run for one purpose."""
        return jax.random.fold_in(jax.random.key(self.seed), purpose)

    def loss(self, chosen: Flat, frozen: Flat, teacher: Any, batch: Batch, step: jax.Array):
        """Loss of a micro-batch `{image, targets, id}` and its parts."""
        # Not differentiating the frozen ones keeps the whole backward pass below them out.
        frozen = gather(frozen, self.mesh)
        params = optimizer.merge(gather(chosen, self.mesh), frozen)
        keys = rng.example_keys(self.key(MODEL_KEY), step, batch["id"])
        logits, out = self.model.apply({"params": params}, batch["image"], train=True, keys=keys)
        targets, distilled = batch["targets"], {}
        if self.teacher is not None:
            taught = self.teach(self.teacher, teacher, frozen, batch["image"])
            distilled = self.model.distillation_losses((logits, out), taught)
            if self.from_model:
                targets = self.task.predicted_targets(taught[0], self.model)
        criterion = functools.partial(self.task.criterion, targets=targets)
        extra = self.model.reducer_losses(out, criterion)
        total, parts = self.task.losses(logits, extra, targets)
        return total + sum(distilled.values()), parts | distilled

    def teach(self, model: ViT, params: Any, frozen: Flat, images: jax.Array) -> Prediction:
        """What the teacher returns for images; nothing is drawn, as in evaluation.

        Args:
          model: the teacher.
          params: of its own, or None: then it is the frozen backbone of the model that is trained.
          frozen: flat frozen parameters of that model, gathered.
          images: normalised.
        """
        if params is None:
            whole = {k: leaf for k, leaf in frozen.items() if not k.startswith("reducer_")}
            params = optimizer.unflatten(whole)
        else:
            params = gather(params, self.mesh)
        return jax.lax.stop_gradient(model.apply({"params": params}, images, train=False))

    def gradients(
        self, chosen: Flat, frozen: Flat, teacher: Any, batch: Batch, step: jax.Array
    ) -> tuple[Flat, Metrics]:
        """Mean gradient and metrics over the micro-batches.

        Micro-batch j takes every `accum_steps`-th image from j on: with the batch cut over devices
        each device slices its own part, and nothing is exchanged.
        """
        differentiate = jax.value_and_grad(self.loss, has_aux=True)

        def one(micro: Batch) -> tuple[Flat, Metrics]:
            (loss, parts), grads = differentiate(chosen, frozen, teacher, micro, step)
            return grads, {"loss": loss, **parts}

        if self.accum_steps == 1:
            return one(batch)

        def cut(x: jax.Array) -> jax.Array:
            return x.reshape(x.shape[0] // self.accum_steps, self.accum_steps, *x.shape[1:])

        strided = jax.tree.map(cut, batch)

        def pick(j: jax.Array) -> Batch:
            return jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, j, axis=1, keepdims=False), strided
            )

        def add(total: Flat, j: jax.Array) -> tuple[Flat, Metrics]:
            grads, metrics = one(pick(j))
            return jax.tree.map(jnp.add, total, grads), metrics

        # From zeros and not from the first micro-batch: the model is compiled once, in the loop.
        zeros = jax.tree.map(jnp.zeros_like, chosen)
        total, metrics = jax.lax.scan(add, zeros, jnp.arange(self.accum_steps))
        mean = jax.tree.map(lambda x: x / self.accum_steps, total)
        return mean, jax.tree.map(lambda x: x.mean(0), metrics)

    def targets(self, batch: Batch, step: jax.Array) -> Batch:
        """What the model is to see and to predict: `{image, targets, id}`."""
        images, labels = batch["image"], batch["label"]
        if self.mixing is None:
            targets = self.task.targets(labels, self.model)
        else:
            key = jax.random.fold_in(self.key(MIXUP_KEY), step)
            images, targets = mixup.mix(self.mixing, key, images, labels, self.model.num_classes)
        return {"image": images, "targets": targets, "id": batch["id"]}

    def train(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step on a global batch.

        Args:
          state: before the step; to be donated.
          batch: `image` float32 [b, h, w, 3] normalised, `label` int [b] or [b, h, w], `id` int
            [b].

        Returns:
          The state after the step, and scalars: loss and its parts, learning rate, gradient norm.
        """
        targeted = self.targets(batch, state.step)
        chosen, frozen = optimizer.split(state.params, self.trainable)
        grads, metrics = self.gradients(chosen, frozen, state.teacher, targeted, state.step)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, chosen)
        moved: Any = optax.apply_updates(chosen, updates)
        metrics |= {
            "learning_rate": self.schedule(state.step),
            "gradient_norm": optax.tree.norm(grads),
        }
        after = TrainState(
            step=state.step + 1,
            params=optimizer.merge(moved, frozen),
            opt_state=opt_state,
            ema=optimizer.update_ema(state.ema, moved, self.ema),
            teacher=state.teacher,
        )
        return after, metrics

    def evaluate(self, params: dict[str, Any], batch: Batch) -> Metrics:
        """The task's sums over the real examples of a batch `{image, label, id, mask, ...}`."""
        params = gather(params, self.mesh)
        keys = rng.example_keys(self.key(EVAL_KEY), 0, batch["id"])

        def predict(images: jax.Array) -> jax.Array:
            return self.model.apply({"params": params}, images, train=False, keys=keys)[0]

        return self.task.evaluation_sums(self.task.predict(predict, batch), batch)


def gather(params: Any, mesh: Mesh) -> Any:
    """Whole parameters on every device, of parameters cut over `fsdp`.

    Said outright, since the partitioner would else be free to cut the width of the activations.
    The gradient goes back to the device that holds the part (a reduce-scatter).
    """
    if mesh.shape["fsdp"] == 1:
        return params
    whole = sharding.replicated(mesh)

    def one(leaf: jax.Array, part: jax.sharding.NamedSharding) -> jax.Array:
        def constrain(x):
            return jax.lax.with_sharding_constraint(x, whole)

        collect = jax.custom_vjp(constrain)
        collect.defvjp(
            lambda x: (constrain(x), None),
            lambda _, grad: (jax.lax.with_sharding_constraint(grad, part),),
        )
        return collect(leaf)

    return jax.tree.map(one, params, sharding.state_shardings(params, mesh))


def jit_train(step: Step, shardings: Any) -> Any:
    """`step.train` under `jax.jit`: state donated and left where it lies, batch over all devices.

    Args:
      step: its parts.
      shardings: of the state, from `sharding.state_shardings`.
    """
    batch = sharding.batch_sharding(step.mesh)
    return jax.jit(
        step.train,
        in_shardings=(shardings, batch),
        out_shardings=(shardings, sharding.replicated(step.mesh)),
        donate_argnums=0,
    )


def jit_evaluate(step: Step, shardings: Any) -> Any:
    """`step.evaluate` under `jax.jit`; `shardings` are those of the parameters."""
    batch = sharding.batch_sharding(step.mesh)
    return jax.jit(
        step.evaluate,
        in_shardings=(shardings, batch),
        out_shardings=sharding.replicated(step.mesh),
    )
