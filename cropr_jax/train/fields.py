"""The fields of a config: what each may hold, and which may differ between two starts of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from cropr_jax import tasks
from cropr_jax.convert.resample import METHODS
from cropr_jax.errors import ConfigError
from cropr_jax.host import schema
from cropr_jax.host.schema import (
    FLAG,
    SECTION,
    SIZE,
    TEXT,
    WORD,
    Field,
    choice,
    number,
    optional,
    several,
    whole,
)
from cropr_jax.models import fields as model_fields
from cropr_jax.reducers import registry
from cropr_jax.tasks import Task
from cropr_jax.train import learning_rate, routers

# Fields of the sections that all tasks have; tasks and models add their own. A section that is not
# there is not read; the first one says which must be.
SHARED: dict[str, schema.Section] = {
    "": {
        "task": Field(WORD, "what is learnt: classification, segmentation or MODULE:NAME"),
        "seed": Field(whole(0, 2**32 - 1), "of all random numbers"),
        "total_epochs": Field(number(0, 1e6, above=True), "length of the run"),
        "total_steps": Field(whole(1), "length of the run instead of its epochs", False),
        "batch_size": Field(whole(1), "examples of an optimizer step, on all devices"),
        "accum_steps": Field(whole(1, 2**16), "parts of a batch, one after the other", False),
        "eval_batch_size": Field(whole(1), "examples of a step of evaluation"),
        "log_every": Field(whole(1), "steps between two records of training"),
        "eval_every": Field(number(0, 1e6), "epochs between two evaluations; 0 for one at the end"),
        "checkpoint_every": Field(whole(1), "steps between two checkpoints"),
        "data": Field(SECTION, "where the examples are"),
        "preprocess": Field(SECTION, "how images are resized, changed and normalised"),
        "optimizer": Field(SECTION, "AdamW and its learning rate"),
        "mesh": Field(SECTION, "how devices share the work"),
        "model": Field(SECTION, "what is trained"),
        "cpu_devices": Field(whole(1, 2**10), "devices that a CPU counts as", False),
        "compiler_options": Field(SECTION, "of XLA for the training step", False),
        "init": Field(TEXT, "weights to start from; empty for fresh ones", False),
        "init_resampling": Field(choice(*METHODS), "how weights get to another grid", False),
        "teacher": Field(TEXT, "weights of the model that is learnt from", False),
        "train": Field(choice(*routers.TRAIN), "what is trained", False),
        "targets": Field(choice(*routers.TARGETS), "what routers learn from", False),
        "distributed": Field(FLAG, "join the processes of several hosts", False),
        "curriculum": Field(SECTION, "pruning that grows in the first epochs", False),
    },
    "data": {
        "source": Field(WORD, "kind of the data set"),
        "train": Field(WORD, "split to train on"),
        "eval": Field(SECTION, "splits to evaluate on, by name"),
        "workers": Field(whole(0, 512), "processes that read; 0 for threads"),
        "name": Field(TEXT, "name of the data set", False),
        "dir": Field(TEXT, "its folder; empty for what the variable says", False),
        "env": Field(TEXT, "environment variable with the folder", False),
        "num_examples": Field(whole(1), "examples of made-up data", False),
        "image_size": Field(SIZE, "height and width of made-up images", False),
        "num_classes": Field(whole(0, 2**20), "classes; 0 to count them", False),
    },
    "optimizer": {
        "lr": Field(number(0, 10, above=True), "peak learning rate at lr_reference examples"),
        "lr_reference": Field(number(1, 1e9), "batch size that lr is for", False),
        "min_lr": Field(number(0, 10), "learning rate at the end"),
        "warmup_epochs": Field(number(0, 1e6), "epochs in which the learning rate rises"),
        "schedule": Field(choice(*learning_rate.DECAYS), "how the learning rate falls"),
        "power": Field(number(0, 100, above=True), "of what is left, with schedule='poly'", False),
        "weight_decay": Field(number(0, 10), "decoupled weight decay"),
        "betas": Field(several(number(0, 1, below=True), 2), "decay rates of the two moments"),
        "eps": Field(number(0, 1, above=True), "added to the root of the second moment"),
        "layer_decay": Field(
            number(0, 1, above=True), "ratio of the learning rates of neighbouring blocks"
        ),
        "clip_norm": Field(number(0, 1e9, above=True), "norm that gradients are cut to", False),
        "freeze": Field(several(schema.REGEX), "names of parameters that are not trained", False),
        "ema": Field(number(0, 1, below=True), "decay of the average of parameters", False),
    },
    "curriculum": {
        "epochs": Field(
            optional(number(0, 1e6)), "epochs in which pruning grows from rate to rate; 0 for none"
        ),
        "start": Field(whole(0, 2**20), "rate of the first epoch", False),
        "step": Field(whole(1, 2**20), "rates are rounded down to its multiples", False),
    },
    "mesh": {
        "data": Field(
            schema.either(choice(-1), whole(1, 2**20)), "devices that share a batch; -1 for all"
        ),
        "fsdp": Field(whole(1, 2**20), "devices that share the parameters"),
    },
}
# Sections whose names are free.
_OPEN = {
    "data.eval": Field(WORD, "a split to evaluate on"),
    "compiler_options": Field(schema.ANYTHING, "an option of XLA"),
}
# What the section of a model must have, beside what its head says that it may.
_NEEDED = ("image_size", "num_classes", "reduction")
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


def sections(task: type[Task], config: Mapping[str, Any]) -> dict[str, schema.Section]:
    """The declared fields of each section of a config.

    Args:
      task: that it names.
      config: plain values, whose method says which options there are.
    """
    merged = dict(SHARED)
    for name, section in task.fields.items():
        merged[name] = {**merged.get(name, {}), **section}
    model, reduction = model_fields.of_head(task.head), model_fields.of_reduction()
    merged["model"] = model | {name: model[name]._replace(needed=True) for name in _NEEDED}
    merged["model.reduction"] = reduction | {"name": reduction["name"]._replace(needed=True)}
    method = _section(config, "model.reduction.name")
    if isinstance(method, str) and method in registry.REDUCERS | registry.OF_FUSIONS:
        merged["model.reduction.options"] = model_fields.of_options(method)
    return merged


def _section(config: Mapping[str, Any], name: str) -> Any:
    """A section by its dotted name, None if it is not there."""
    node: Any = config
    for part in name.split(".") if name else ():
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def check_task(config: Mapping[str, Any]) -> None:
    """Refuses a config that names no task; see `check` for the rest.

    Raises:
      ConfigError: naming the field.
    """
    task = {"task": SHARED[""]["task"]}
    schema.check_values("config", task, {"task": config.get("task")})


def check(config: Mapping[str, Any], task: type[Task]) -> None:
    """Refuses unknown and missing fields, and values that they cannot have.

    Args:
      config: plain values.
      task: that it names.

    Raises:
      ConfigError: naming the field, what was found and what was expected.
    """
    for name, section in sections(task, config).items():
        values = _section(config, name)
        if values is None:
            continue
        where = f"config.{name}" if name else "config"
        schema.check_names(where, section, values)
        schema.check_values(where, section, values)
    for name, field in _OPEN.items():
        values = _section(config, name) or {}
        schema.check_values(f"config.{name}", dict.fromkeys(values, field), values)


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


def declared(config: Mapping[str, Any]) -> dict[str, Field]:
    """What is declared of every field that a config (plain values) holds, by dotted name."""
    known = sections(tasks.get(config["task"]), config)
    found = {}
    for name in leaves(config):
        section, _, last = name.rpartition(".")
        found[name] = known.get(section, {}).get(last) or _OPEN[section]
    return found


def describe(config: Mapping[str, Any]) -> str:
    """Value, meaning and range of every field of a config, in words."""
    values = leaves(config)
    return "\n".join(
        f"config.{name} = {json.dumps(values[name])}\n    {field.meaning}: {field.kind.expected}"
        for name, field in declared(config).items()
    )
