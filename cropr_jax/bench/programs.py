"""Compiled programs with their inputs on the device, ready to be timed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cropr_jax import models, tasks
from cropr_jax.core import rng, trees
from cropr_jax.models import Trunk
from cropr_jax.reducers.registry import method
from cropr_jax.train import assemble, sharding
from cropr_jax.train.state import TrainState, create_state
from cropr_jax.train.step import jit_train, run_key

# What is timed of a model: three forms of its forward pass, and a training step.
INFERENCE = ("slim", "all_queries")
STAGES = (*INFERENCE, "train_form", "train")


def differs(model: Trunk, stage: str) -> bool:
    """Whether a stage of the model is another program than its slim form.

    Only some scorers have queries to sum, and a method without losses of its own has no auxiliary
    branch.
    """
    if stage == "train" or model.reduction == "none":
        return stage == "train"
    if stage == "all_queries":
        return "sum_first" in method(model.reduction).__dataclass_fields__
    return stage == "train_form" and bool(model.make_reducer().describe_losses)


def in_form(model: Trunk, stage: str) -> Trunk:
    """The model as a stage runs it.

    Args:
      model: training form.
      stage: 'slim': one query a site. 'all_queries': the product of all queries with all tokens,
        then their sum, as the released code runs inference. 'train_form' and 'train': the training
        form; in 'train_form' no path is dropped.
    """
    if stage == "slim":
        return model.clone(slim=True)
    if stage == "all_queries":
        options = dict(model.reducer_options) | {"sum_first": False}
        return model.clone(reducer_options=tuple(sorted(options.items())))
    if stage == "train_form":
        return model.clone(drop_path=0.0, drop_path_last_block=0.0)
    return model


class Weights:
    """Made-up parameters; leaves of the same name and shape are shared between models."""

    def __init__(self):
        self._random = np.random.default_rng(0)
        self._leaves: dict[tuple, jax.Array] = {}

    def fill(self, shapes: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays for a tree of shapes: norms of scale one, biases zero, all else normal.

        Args:
          shapes: nested `jax.ShapeDtypeStruct`s.
        """
        flat = trees.flatten(shapes)
        filled = {name: self._leaf(name, leaf.shape) for name, leaf in flat.items()}
        return trees.unflatten(filled)

    def _leaf(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        if (name, shape) not in self._leaves:
            if name.endswith(("/scale", "/gamma")):
                made = np.ones(shape, np.float32)
            elif name.endswith("/bias"):
                made = np.zeros(shape, np.float32)
            else:
                made = 0.02 * self._random.standard_normal(shape, np.float32)
            self._leaves[name, shape] = jnp.asarray(made)
        return self._leaves[name, shape]


class Pool:
    """What training programs change, shared between models by name and shape.

    A program takes the leaves of its state and puts back what became of them, so that models side
    by side need the memory of one.
    """

    def __init__(self):
        self._leaves: dict[tuple, jax.Array] = {}

    def add(self, tree: Any) -> None:
        """Adds the leaves that are not there yet, arrays that nobody else needs."""
        for name, leaf in self._named(tree):
            self._leaves.setdefault(name, leaf)

    def missing(self, tree: Any) -> bool:
        """Whether a leaf of a tree of shapes is not there."""
        return any(name not in self._leaves for name, _ in self._named(tree))

    def take(self, tree: Any) -> Any:
        """Arrays for a tree of shapes; they are the caller's until `put`."""
        return jax.tree.unflatten(
            jax.tree.structure(tree), [self._leaves.pop(name) for name, _ in self._named(tree)]
        )

    def put(self, tree: Any) -> None:
        """Takes arrays back."""
        self._leaves |= dict(self._named(tree))

    @staticmethod
    def _named(tree: Any) -> list[tuple[tuple, Any]]:
        leaves, _ = jax.tree.flatten_with_path(tree)
        return [((jax.tree_util.keystr(path), leaf.shape), leaf) for path, leaf in leaves]


class Program:
    """One compiled program.

    Attributes:
      batch_size: images of a call.
      trace_seconds: of tracing and lowering.
      compile_seconds: of XLA's compilation.
      peak_bytes: arguments, outputs and temporaries together, as the compiler plans them for each
        device.
      flops: floating point operations of a call, on all devices, as XLA counts them, the body of a
        loop once; None where it does not.
    """

    def __init__(
        self,
        function: Any,
        batch_size: int,
        batch: tuple[Any, ...],
        state: Any,
        pool: Pool | None = None,
        options: Mapping[str, Any] | None = None,
        devices: int = 1,
    ):
        """Compiles `function(state, *batch)`.

        Args:
          function: under `jax.jit`.
          batch_size: images of a call.
          batch: arguments after the state, on the device.
          state: parameters on the device; with a pool, the shapes of what it holds.
          pool: where the state is, whose next value is the first output of each call.
          options: of XLA's compiler.
          devices: that share a call.
        """
        self.batch_size = batch_size
        self._state, self._batch, self._pool = state, batch, pool
        start = time.perf_counter()
        lowered = function.lower(state, *batch)
        traced = time.perf_counter()
        self._compiled = lowered.compile(compiler_options=options)
        self.trace_seconds, self.compile_seconds = traced - start, time.perf_counter() - traced
        memory = self._compiled.memory_analysis()
        self.peak_bytes = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        )
        of_one = self._compiled.cost_analysis().get("flops")
        self.flops = None if of_one is None else devices * of_one

    def seconds(self, calls: int = 1) -> float:
        """Wall time of a call, the mean over `calls`; no host work but the dispatch is in it."""
        state = self._pool.take(self._state) if self._pool else self._state
        start = time.perf_counter()
        for _ in range(calls):
            output = jax.block_until_ready(self._compiled(state, *self._batch))
            if self._pool:
                state = output[0]
        mean = (time.perf_counter() - start) / calls
        if self._pool:
            self._pool.put(state)
        return mean


def example_inputs(model: Trunk, batch_size: int) -> tuple[jax.Array, jax.Array]:
    """Made-up normalised images and keys on the device."""
    shape = (batch_size, *model.image_size, 3)
    images = np.random.default_rng(1).standard_normal(shape, np.float32)
    keys = rng.example_keys(jax.random.key(0), 0, jnp.arange(batch_size))
    return jax.device_put(images), keys


class Inference:
    """Makes programs of a forward pass, for any batch size, over one set of parameters.

    Attributes:
      smallest: batch size.
      model: in the form that is timed.
      params: on the device, in the dtype in which the model uses them.
    """

    smallest = 1

    def __init__(self, model: Trunk, weights: Weights, stage: str):
        """Makes up the parameters.

        Args:
          model: training form.
          weights: its parameters, of which those of other forms are made.
          stage: 'slim', 'all_queries' or 'train_form' (see `in_form`).
        """
        self._train = stage == "train_form"
        shapes = models.abstract_params(model) if self._train else models.slim_leaves(model)
        params = weights.fill(shapes)
        if stage == "slim":
            params = models.slim_params(model, params)
        self.model = in_form(model, stage)
        self.params = models.cast_params(self.model, params)

    def predict(self, params: Any, images: jax.Array, keys: jax.Array) -> Any:
        """The prediction; of the training form also what its losses need, lest it is left out."""
        prediction, out = self.model.apply({"params": params}, images, train=self._train, keys=keys)
        return (prediction, out["sites"]) if self._train else prediction

    def compile(self, batch_size: int) -> Program:
        """The program for a batch size."""
        batch = example_inputs(self.model, batch_size)
        return Program(jax.jit(self.predict), batch_size, batch, self.params)


# A run's length and warm-up decide a scalar in the step, and nothing about its time.
STEPS, WARMUP = 1000, 10


class Training:
    """Makes programs that take a training step, the one that `cropr_jax.train` takes.

    Attributes:
      smallest: batch size.
      model: training form.
    """

    def __init__(self, model: Trunk, pool: Pool, config: Mapping[str, Any]):
        """Does nothing on the device.

        Args:
          model: training form.
          pool: for the state.
          config: plain values, see `cropr_jax.train.assemble.make_step`; also `task` and
            `compiler_options`.

        Raises:
          ConfigError: on a wrong field.
        """
        self.model, self._pool = model, pool
        self._options = config.get("compiler_options")
        # Of the weights of a teacher only the sizes matter.
        self._learns = model.reduction != "none" and model.make_reducer().needs_teacher
        teacher = (
            models.unpruned(model) if self._learns or config.get("targets") == "model" else None
        )
        task = tasks.create(config)
        self._step = assemble.make_step(
            config, model, task, warmup=WARMUP, total=STEPS, teacher=teacher
        )
        # Mixing needs two images.
        self.smallest = max(jax.device_count() * self._step.accum_steps, 2)

    def _state(self, params: Any, teacher: Any) -> TrainState:
        step = self._step
        return create_state(params, step.optimizer, step.trainable, step.ema is not None, teacher)

    def compile(self, batch_size: int) -> Program:
        """The program for a batch size."""
        step = self._step
        params = models.abstract_params(self.model)
        teacher = None
        if self._learns and step.teacher is not None:
            teacher = models.abstract_params(step.teacher)
        state = jax.eval_shape(self._state, params, teacher)
        shardings = sharding.state_shardings(state, step.mesh)
        if self._pool.missing(state):
            weights = Weights()
            made = jax.jit(self._state, out_shardings=shardings)
            self._pool.add(made(weights.fill(params), teacher and weights.fill(teacher)))
        batch = sharding.place(step.task.example_batch(self.model, batch_size), step.mesh)
        program = jit_train(step, shardings)
        return Program(
            program,
            batch_size,
            (batch, run_key(0)),
            state,
            self._pool,
            options=self._options,
            devices=step.mesh.size,
        )
