"""What tests of training share: steps on a mesh, and what a run leaves behind."""

import json
from pathlib import Path

import jax
import numpy as np
from conftest import random_params
from jax.sharding import Mesh

from cropr_jax import models
from cropr_jax.core.trees import flatten
from cropr_jax.runs import checkpoints
from cropr_jax.tasks.classification.mixup import MixupConfig
from cropr_jax.tasks.classification.task import Classification
from cropr_jax.train import optimizer
from cropr_jax.train.learning_rate import WarmupCosine
from cropr_jax.train.state import create_state
from cropr_jax.train.step import Step


def mesh_of(data, fsdp):
    devices = np.array(jax.devices()[: data * fsdp]).reshape(data, fsdp)
    return Mesh(devices, ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def make_step(model, mesh, accum_steps=1, freeze=(), group=16, teacher=None, task=None, **kwargs):
    """A step of the task, by default classification with mixup in groups of so many images."""
    names = list(flatten(models.abstract_params(model)))
    trainable = optimizer.trainable(names, freeze)
    rate = WarmupCosine(1e-2, 1e-6, 1, 10)
    return Step(
        model=model,
        task=task or Classification(MixupConfig(group=group)),
        optimizer=optimizer.adamw(trainable, model.depth, rate, layer_decay=0.75, **kwargs),
        learning_rate=rate,
        trainable=trainable,
        accum_steps=accum_steps,
        ema=None,
        mesh=mesh,
        teacher=teacher,
    )


def start(step):
    """A state with random parameters, and no teacher's."""

    @jax.jit
    def made(params):
        return create_state(params, step.optimizer, step.trainable, ema=False)

    return made(random_params(step.model))


def assert_close(got, expected, atol):
    for name, value in flatten(expected.params).items():
        # The gradient of the keys' bias is zero but for rounding, which Adam blows up.
        if not name.endswith("attn/key/bias"):
            np.testing.assert_allclose(flatten(got.params)[name], value, atol=atol, err_msg=name)


def state_in(workdir, step):
    path = Path(workdir) / "checkpoints" / str(step)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        checkpoints.ocp.metadata(path).metadata,
    )
    flat = flatten(checkpoints.ocp.load(path, shapes))
    return {name: np.asarray(leaf) for name, leaf in flat.items() if leaf is not None}


def assert_same_state(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=str(name))


def records(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "images_per_second"} for row in rows]
