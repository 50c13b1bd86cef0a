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
from cropr_jax.slim import cast_params, slim_leaves
from cropr_jax.tasks import classification, segmentation

FORMS = ("slim", "full")
STAGES = ("infer", "train")


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


class Program:
    """One compiled program.

    Attributes:
      batch_size: images of a call.
      trace_seconds: of tracing and lowering.
      compile_seconds: of XLA's compilation.
      peak_bytes: arguments, outputs and temporaries together, as the compiler plans them.
    """

    def __init__(self, function: Any, state: Any, batch: tuple[Any, ...], carry: bool):
        """Compiles `function(state, *batch)`.

        Args:
          function: under `jax.jit`.
          state: parameters, or all that a training step changes; on the device.
          batch: further arguments on the device, the images first.
          carry: the output is the next call's state.
        """
        self.batch_size = batch[0].shape[0]
        self._state, self._batch, self._carry = state, batch, carry
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

    def seconds(self, calls: int = 1) -> float:
        """Wall time of a call, the mean over `calls`; no host work but the dispatch is in it."""
        start = time.perf_counter()
        for _ in range(calls):
            output = jax.block_until_ready(self._compiled(self._state, *self._batch))
            if self._carry:
                self._state = output
        return (time.perf_counter() - start) / calls


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
    """Makes programs that predict, for any batch size, over one set of parameters.

    Attributes:
      model: in the form that is timed.
    """

    def __init__(self, model: ViT, weights: Weights, form: str):
        """Puts the parameters on the device, in the dtype in which the model uses them.

        Args:
          model: training form.
          weights: made-up parameters.
          form: 'slim', or 'full' for scorers as they are in training (no auxiliary branch).
        """
        needed = slim_leaves(model)
        if form == "slim":
            needed = jax.eval_shape(lambda params: models.slim_params(model, params), needed)
            model = model.clone(slim=True)
        self.model = model
        self._params = cast_params(model, weights.fill(needed))

    def compile(self, batch_size: int) -> Program:
        """The program for a batch size."""

        def logits(params, images, keys):
            return self.model.apply({"params": params}, images, keys=keys)[0]

        batch = example_batch(self.model, batch_size)
        return Program(jax.jit(logits), self._params, batch, carry=False)


class Training:
    """Makes programs that take a training step: losses, gradients and AdamW of all parameters.

    Attributes:
      model: training form.
    """

    def __init__(self, model: ViT, weights: Weights):
        self.model = model
        self._params = weights.fill(models.abstract_params(model))

    def compile(self, batch_size: int) -> Program:
        """The program for a batch size, with a state of its own."""
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

        # Copies: the step is given its state for good.
        params = jax.tree.map(jnp.array, self._params)
        batch = (*example_batch(self.model, batch_size), made_up)
        state = params, jax.jit(optimizer.init)(params)
        return Program(jax.jit(step, donate_argnums=0), state, batch, carry=True)
