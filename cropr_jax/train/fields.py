"""The fields of a config: which there are, and which may differ between two starts of a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from cropr_jax.errors import ConfigError
from cropr_jax.host.messages import did_you_mean
from cropr_jax.reducers import registry
from cropr_jax.tasks import Task
from cropr_jax.tasks.base import Names

_MODEL = {"name", "variant", "head", "reduction"}
# Names that a config must and may have, by section. A section that is not there is not read; the
# first one says which must be.
SHARED: dict[str, Names] = {
    "": (
        {
            "task",
            "seed",
            "total_epochs",
            "batch_size",
            "eval_batch_size",
            "log_every",
            "eval_every",
            "checkpoint_every",
            "data",
            "preprocess",
            "optimizer",
            "mesh",
            "model",
        },
        {
            "total_steps",
            "accum_steps",
            "cpu_devices",
            "compiler_options",
            "init",
            "init_resampling",
            "teacher",
            "train",
            "targets",
            "distributed",
            "curriculum",
        },
    ),
    "data": (
        {"source", "train", "eval", "workers"},
        {"name", "dir", "env", "num_examples", "image_size", "num_classes"},
    ),
    "optimizer": (
        {
            "lr",
            "min_lr",
            "warmup_epochs",
            "schedule",
            "weight_decay",
            "betas",
            "eps",
            "layer_decay",
        },
        {"lr_reference", "power", "clip_norm", "freeze", "ema"},
    ),
    "curriculum": ({"epochs"}, {"start", "step"}),
    "mesh": ({"data", "fsdp"}, set()),
    # And every attribute of the task's models.
    "model": ({"image_size", "num_classes", "reduction"}, _MODEL),
    "model.reduction": ({"name"}, {"schedule", "rate", "fusion", "options"}),
}
# What a field has that a config leaves out or sets to None, where that is no value of its own.
DEFAULTS = {
    "accum_steps": 1,
    "init": "",
    "init_resampling": "timm",
    "teacher": "",
    "train": "all",
    "targets": "labels",
    "curriculum.epochs": 0,
    "curriculum.start": 0,
    "curriculum.step": 1,
}
# Fields that may change between two starts of one run: none of them changes a trained number.
FREE = (
    "log_every",
    "eval_batch_size",
    "data.dir",
    "data.env",
    "data.workers",
    "data.eval",
    "preprocess.eval_stride",
    "mesh",
    "cpu_devices",
    "compiler_options",
    "distributed",
)


def plain(config: Any) -> dict[str, Any]:
    """The config as nested dictionaries of JSON values (tuples become lists)."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    return json.loads(json.dumps(config))


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{'a.b': value}` of a nested dictionary."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= leaves(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def settled(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the defaults of what it leaves out, options of its method among them."""
    made = json.loads(json.dumps(config))
    for name, value in DEFAULTS.items():
        *sections, last = name.split(".")
        node = made
        for section in sections:
            node[section] = node.get(section) or {}
            node = node[section]
        if node.get(last) is None:
            node[last] = value
    reduction = made["model"].get("reduction", {})
    # Neither 'none' nor a wrong name, which the model refuses.
    if reduction.get("name") in registry.REDUCERS | registry.OF_FUSIONS:
        defaults = plain(registry.options(reduction["name"]))
        reduction["options"] = defaults | (reduction.get("options") or {})
    return made


def fields_of(task: type[Task]) -> dict[str, Names]:
    """Needed and optional names of each section."""
    merged = dict(SHARED)
    own = {"model": (set(), {field.name for field in dataclasses.fields(task.head)})}
    for section, (needed, optional) in (*task.fields.items(), *own.items()):
        before = merged.get(section, (set(), set()))
        merged[section] = before[0] | needed, before[1] | optional
    return merged


def _section(config: Mapping[str, Any], name: str) -> Any:
    """A section by its dotted name, None if it is not there."""
    node: Any = config
    for part in name.split(".") if name else ():
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def check_names(config: Mapping[str, Any], task: type[Task]) -> None:
    """Refuses unknown and missing fields.

    Args:
      config: plain values.
      task: that it names.

    Raises:
      ConfigError: naming the field, with the names that come close.
    """
    for section, (needed, optional) in fields_of(task).items():
        node = _section(config, section)
        if node is None:
            continue
        where = f"config.{section}" if section else "config"
        if not isinstance(node, Mapping):
            raise ConfigError(f"{where}: found {node!r}, expected a section with {sorted(needed)}")
        for name in node:
            if name not in needed | optional:
                hint = did_you_mean(name, needed | optional)
                raise ConfigError(f"{where}.{name}: no such field; {hint}")
        for name in sorted(needed):
            if name not in node:
                raise ConfigError(f"{where}.{name} is missing")


def difference(
    config: Mapping[str, Any], before: Mapping[str, Any], free: Iterable[str] = FREE
) -> str | None:
    """Name of the first field that differs between two configs, None if only `free` ones do."""
    # Runs of before a field was written out had its default.
    new, old = leaves(settled(config)), leaves(settled(before))
    for name in sorted(new.keys() | old.keys()):
        if any(name == field or name.startswith(field + ".") for field in free):
            continue
        if new.get(name) != old.get(name):
            return name
    return None


def check_same(config: Mapping[str, Any], before: Mapping[str, Any], workdir: Any) -> None:
    """Refuses to go on in a work directory that another config began.

    Raises:
      ConfigError: naming the first field that differs and may not.
    """
    if name := difference(config, before):
        new, old = (leaves(settled(one)).get(name) for one in (config, before))
        raise ConfigError(
            f"config.{name}: {new!r}, but the run in '{workdir}' began with {old!r}: choose "
            "another --workdir, or remove that one"
        )
