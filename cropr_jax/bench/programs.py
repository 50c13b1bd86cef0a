"""Compiled programs with their inputs on the device, ready to be timed."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

from cropr_jax import models, rng
from cropr_jax.models import Segmenter
from cropr_jax.models.vit import ViT
from cropr_jax.reducers.registry import method
from cropr_jax.slim import cast_params, slim_leaves
from cropr_jax.tasks import classification, segmentation

# What is timed of a model: three forms of its forward pass, and a training step.
INFERENCE = ("slim", "all_queries")
STAGES = (*INFERENCE, "train_form", "train")


def differs(model: ViT, stage: str) -> bool:
    """Whether a stage of the model is another program than its slim form.

    Only some scorers have queries to sum, and a method without losses of its own has no auxiliary
    branch.
    """
    if stage == "train" or model.reduction == "none":
        return stage == "train"
    if stage == "all_queries":
        return "sum_first" in method(model.reduction).__dataclass_fields__
    return stage == "train_form" and bool(model.make_reducer().describe_losses)


def in_form(model: ViT, stage: str) -> ViT:
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
        options = dict(model.reducer) | {"sum_first": False}
        return model.clone(reducer=tuple(sorted(options.items())))
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
        flat = traverse_util.flatten_dict(dict(shapes), sep="/")
        filled = {name: self._leaf(name, leaf.shape) for name, leaf in flat.items()}
        return traverse_util.unflatten_dict(filled, sep="/")

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
      peak_bytes: arguments, outputs and temporaries together, as the compiler plans them.
      flops: floating point operations of a call as XLA counts them, the body of a loop once; None
        where it does not.
    """

    def __init__(self, function: Any, batch: tuple[Any, ...], state: Any, pool: Pool | None = None):
        """Compiles `function(state, *batch)`.

        Args:
          function: under `jax.jit`.
          batch: arguments after the state, on the device, the images first.
          state: parameters on the device; with a pool, the shapes of what it holds.
          pool: where the state is, whose next value is the output of each call.
        """
        self.batch_size = batch[0].shape[0]
        self._state, self._batch, self._pool = state, batch, pool
        start = time.perf_counter()
        lowered = function.lower(state, *batch)
        traced = time.perf_counter()
        self._compiled = lowered.compile()
        self.trace_seconds, self.compile_seconds = traced - start, time.perf_counter() - traced
        memory = self._compiled.memory_analysis()
        self.peak_bytes = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        )
        self.flops = self._compiled.cost_analysis().get("flops")

    def seconds(self, calls: int = 1) -> float:
        """Wall time of a call, the mean over `calls`; no host work but the dispatch is in it."""
        state = self._pool.take(self._state) if self._pool else self._state
        start = time.perf_counter()
        for _ in range(calls):
            output = jax.block_until_ready(self._compiled(state, *self._batch))
            if self._pool:
                state = output
        mean = (time.perf_counter() - start) / calls
        if self._pool:
            self._pool.put(state)
        return mean


def example_batch(model: ViT, batch_size: int) -> tuple[jax.Array, jax.Array]:
    """Made-up normalised images and keys on the device."""
    shape = (batch_size, *model.image_size, 3)
    images = np.random.default_rng(1).standard_normal(shape, np.float32)
    keys = rng.example_keys(jax.random.key(0), 0, jnp.arange(batch_size))
    return jax.device_put(images), keys


def example_targets(model: ViT, batch_size: int) -> tuple[ModuleType, Any]:
    """The model's task, and made-up targets for it on the device."""
    shape = (batch_size, *(model.image_size if isinstance(model, Segmenter) else ()))
    labels = jnp.asarray(np.random.default_rng(2).integers(model.num_classes, size=shape))
    if isinstance(model, Segmenter):
        return segmentation, segmentation.targets(labels, model)
    return classification, jax.nn.one_hot(labels, model.num_classes)


class Inference:
    """Makes programs of a forward pass, for any batch size, over one set of parameters.

    Attributes:
      model: in the form that is timed.
      params: on the device, in the dtype in which the model uses them.
    """

    def __init__(self, model: ViT, weights: Weights, stage: str):
        """Makes up the parameters.

        Args:
          model: training form.
          weights: its parameters, of which those of other forms are made.
          stage: 'slim', 'all_queries' or 'train_form' (see `in_form`).
        """
        self._train = stage == "train_form"
        params = weights.fill(models.abstract_params(model) if self._train else slim_leaves(model))
        if stage == "slim":
            params = models.slim_params(model, params)
        self.model = in_form(model, stage)
        self.params = cast_params(self.model, params)

    def predict(self, params: Any, images: jax.Array, keys: jax.Array) -> Any:
        """Logits; of the training form also what its losses need, so that it is computed."""
        logits, out = self.model.apply({"params": params}, images, train=self._train, keys=keys)
        return (logits, out["sites"]) if self._train else logits

    def compile(self, batch_size: int) -> Program:
        """The program for a batch size."""
        return Program(jax.jit(self.predict), example_batch(self.model, batch_size), self.params)


class Training:
    """Makes programs that take a training step: losses, gradients and AdamW of all parameters.

    Attributes:
      model: training form.
    """

    def __init__(self, model: ViT, pool: Pool):
        """Does nothing on the device.

        Args:
          model: training form.
          pool: for the parameters and their moments.
        """
        self.model = model
        self._pool = pool

    def compile(self, batch_size: int) -> Program:
        """The program for a batch size."""
        optimizer = optax.adamw(1e-5, weight_decay=0.05)
        task, made_up = example_targets(self.model, batch_size)

        def loss(params, images, keys, targets):
            logits, out = self.model.apply({"params": params}, images, train=True, keys=keys)
            criterion = functools.partial(task.criterion, targets=targets)
            extra = self.model.reducer_losses(out, criterion)
            return task.losses(logits, extra, targets)[0]

        def step(state, images, keys, targets):
            params, moments = state
            gradients = jax.grad(loss)(params, images, keys, targets)
            updates, moments = optimizer.update(gradients, moments, params)
            return optax.apply_updates(params, updates), moments

        params = models.abstract_params(self.model)
        state = params, jax.eval_shape(optimizer.init, params)
        if self._pool.missing(state):
            made = Weights().fill(params)
            self._pool.add((made, jax.jit(optimizer.init)(made)))
        batch = (*example_batch(self.model, batch_size), made_up)
        return Program(jax.jit(step, donate_argnums=0), batch, state, self._pool)
