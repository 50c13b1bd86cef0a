"""One training step and one evaluation step, as pure functions for `jax.jit`.

Everything random is folded from (seed, step, example or group), so devices, hosts and micro-batches
change no number but the order of sums. The seed comes in as a key, an argument: what is compiled
for one seed serves all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from cropr_jax.core import rng, trees
from cropr_jax.core.reducer import Prediction
from cropr_jax.models import Trunk
from cropr_jax.tasks import Task
from cropr_jax.train import sharding
from cropr_jax.train.state import Flat, TrainState, merge, split, update_ema

Batch = dict[str, Any]  # arrays, or trees of them
Metrics = dict[str, jax.Array]

# What the keys that are folded from the seed are for.
INIT_KEY, MODEL_KEY, PREPARE_KEY, EVAL_KEY = range(4)


def run_key(seed: int) -> jax.Array:
    """The key of a run, from which all others are folded."""
    return jax.random.key(seed)


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step is made of; all of it is fixed before tracing.

    Attributes:
      model: training form.
      task: of the model.
      optimizer: transformation of flat gradients of the trained parameters.
      learning_rate: by step, for the log.
      trainable: names of the parameters that are trained.
      accum_steps: micro-batches of a step.
      ema: decay of the average of parameters, None for no average.
      mesh: devices.
      teacher: frozen, unpruned model whose outputs the method learns from; None for no such model.
      from_model: whether its predictions are the targets, instead of the labels.
    """

    model: Trunk
    task: Task
    optimizer: optax.GradientTransformation
    learning_rate: Callable[[jax.Array], jax.Array]
    trainable: Sequence[str]
    accum_steps: int
    ema: float | int | None
    mesh: Mesh
    teacher: Trunk | None = None
    from_model: bool = False

    def loss(
        self,
        trained: Flat,
        frozen: Flat,
        teacher: Any,
        batch: Batch,
        step: jax.Array,
        key: jax.Array,
    ):
        """Loss of a micro-batch `{inputs, targets, id}` and its parts."""
        # Not differentiating the frozen ones keeps the whole backward pass below them out.
        frozen = gather(frozen, self.mesh)
        params = merge(gather(trained, self.mesh), frozen)
        keys = rng.example_keys(jax.random.fold_in(key, MODEL_KEY), step, batch["id"])
        inputs, targets, distilled = batch["inputs"], batch["targets"], {}
        prediction, out = self.model.apply({"params": params}, inputs, train=True, keys=keys)
        if self.teacher is not None:
            taught = self.teach(self.teacher, teacher, frozen, inputs)
            distilled = self.model.distillation_losses((prediction, out), taught)
            if self.from_model:
                targets = self.task.predicted_targets(taught[0], self.model)
        criterion = functools.partial(self.task.criterion, targets=targets)
        extra = self.model.reducer_losses(out, criterion)
        total, parts = self.task.losses(prediction, extra, targets)
        return total + sum(distilled.values()), parts | distilled

    def teach(self, model: Trunk, params: Any, frozen: Flat, inputs: Batch) -> Prediction:
        """What the teacher returns for the same inputs; nothing is drawn, as in evaluation.

        Args:
          model: the teacher.
          params: of its own, or None: then it is the frozen backbone of the model that is trained.
          frozen: flat frozen parameters of that model, gathered.
          inputs: of the model.
        """
        if params is None:
            whole = {name: leaf for name, leaf in frozen.items() if not trees.of_site(name)}
            params = trees.unflatten(whole)
        else:
            params = gather(params, self.mesh)
        return jax.lax.stop_gradient(model.apply({"params": params}, inputs, train=False))

    def gradients(
        self,
        trained: Flat,
        frozen: Flat,
        teacher: Any,
        batch: Batch,
        step: jax.Array,
        key: jax.Array,
    ) -> tuple[Flat, Metrics]:
        """Mean gradient and metrics over the micro-batches.

        Micro-batch j takes every `accum_steps`-th example from j on: with the batch cut over
        devices each device slices its own part, and nothing is exchanged.
        """
        differentiate = jax.value_and_grad(self.loss, has_aux=True)

        def one(micro: Batch) -> tuple[Flat, Metrics]:
            (loss, parts), grads = differentiate(trained, frozen, teacher, micro, step, key)
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
        zeros = jax.tree.map(jnp.zeros_like, trained)
        total, metrics = jax.lax.scan(add, zeros, jnp.arange(self.accum_steps))
        mean = jax.tree.map(lambda x: x / self.accum_steps, total)
        return mean, jax.tree.map(lambda x: x.mean(0), metrics)

    def train(self, state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        """One optimizer step on a global batch.

        Args:
          state: before the step; to be donated.
          batch: of training examples of the task, with `id` int [b].
          key: of the run.

        Returns:
          The state after the step, and scalars: loss and its parts, learning rate, norms of the
          gradients before the step and of the trained parameters after it.
        """
        drawn = jax.random.fold_in(jax.random.fold_in(key, PREPARE_KEY), state.step)
        inputs, targets = self.task.prepare(batch, self.model, drawn)
        prepared = {"inputs": inputs, "targets": targets, "id": batch["id"]}
        trained, frozen = split(state.params, self.trainable)
        grads, metrics = self.gradients(trained, frozen, state.teacher, prepared, state.step, key)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, trained)
        moved: Any = optax.apply_updates(trained, updates)
        metrics |= {
            "learning_rate": self.learning_rate(state.step),
            "gradient_norm": optax.tree.norm(grads),
            # Not finite long before the parameters are: their squares are summed.
            "parameter_norm": optax.tree.norm(moved),
        }
        after = TrainState(
            step=state.step + 1,
            params=merge(moved, frozen),
            opt_state=opt_state,
            ema=update_ema(state.ema, moved, self.ema),
            teacher=state.teacher,
        )
        return after, metrics

    def evaluate(self, params: dict[str, Any], batch: Batch, key: jax.Array) -> dict[str, Any]:
        """What the task's evaluator takes up: its measures, and `id` and `mask` of all rows.

        Args:
          params: of the model.
          batch: of evaluation examples of the task, with `id` and `mask`.
          key: of the run.
        """
        params = gather(params, self.mesh)
        keys = rng.example_keys(jax.random.fold_in(key, EVAL_KEY), 0, batch["id"])

        def apply(inputs: Batch) -> Any:
            return self.model.apply({"params": params}, inputs, train=False, keys=keys)[0]

        outputs = self.task.measure(apply, batch)
        return {**outputs, "id": batch["id"], "mask": batch["mask"]}


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
    batch, everywhere = sharding.batch_sharding(step.mesh), sharding.replicated(step.mesh)
    return jax.jit(
        step.train,
        in_shardings=(shardings, batch, everywhere),
        out_shardings=(shardings, everywhere),
        donate_argnums=0,
    )


def jit_evaluate(step: Step, shardings: Any) -> Any:
    """`step.evaluate` under `jax.jit`; `shardings` are those of the parameters."""
    batch, everywhere = sharding.batch_sharding(step.mesh), sharding.replicated(step.mesh)
    return jax.jit(
        step.evaluate, in_shardings=(shardings, batch, everywhere), out_shardings=everywhere
    )
