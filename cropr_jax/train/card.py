"""The resolved recipe in words, and what its model costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from cropr_jax import models
from cropr_jax.core import trees
from cropr_jax.models import costs
from cropr_jax.reducers import registry
from cropr_jax.train import fields, logging, routers
from cropr_jax.train.recipe import Recipe


def facts(recipe: Recipe) -> dict[str, Any]:
    """What the model costs (`cropr_jax.models.costs.facts`), and how much of it is trained."""
    flat = trees.flatten(models.abstract_params(recipe.model))
    trained = sum(flat[name].size for name in recipe.training.trainable)
    return costs.facts(recipe.model) | {"params_trained": trained}


def _reduction(values: Mapping[str, Any]) -> str:
    """The method in words, with those options that are not its own defaults."""
    if values["name"] == "none":
        return "none"
    defaults = fields.plain(registry.options(values["name"]))
    before = {"schedule": "", "rate": "R ", "fusion": "fusion "}
    words = [values["name"], *(f"{word}{values[k]}" for k, word in before.items() if k in values)]
    words += [
        f"{name} {value}"
        for name, value in values.get("options", {}).items()
        if value != defaults[name]
    ]
    return ", ".join(words)


def _losses(recipe: Recipe) -> str:
    """All losses in words."""
    model, main = recipe.model, recipe.task.main_loss
    words = ["" if model.reduction == "none" else model.make_reducer().describe_losses]
    if routers.only(recipe.config):
        words += ["only the routers are trained"]
    if routers.from_model(recipe.config):
        words += ["targets are the predictions of the frozen model, unpruned"]
    return ", ".join(filter(None, [main, *words]))


def card(recipe: Recipe) -> str:
    """The resolved recipe in a table."""
    rows = [*_model_rows(recipe), *_training_rows(recipe)]
    rows += [("note", note) for note in getattr(recipe.splits.train.reader, "notes", ())]
    return logging.table([row for row in rows if row[1] != ""], "Recipe")


def _model_rows(recipe: Recipe) -> list[tuple[str, Any]]:
    """Data, model and what it costs."""
    config, model, found = recipe.config, recipe.model, facts(recipe)
    data = f"{config['data'].get('name') or config['data']['source']}"
    splits = ", ".join(f"{name} {count}" for name, count in recipe.eval_examples.items())
    pool = f", pool {model.pool}" if hasattr(model, "pool") else ""
    tokens = " ".join(map(str, found["tokens"])) or "all"
    return [
        ("data", f"{data}, {len(recipe.splits.train)} training images; {splits}"),
        (
            "model",
            f"width {model.width}, depth {model.depth}, heads {model.heads}, image "
            f"{'x'.join(map(str, model.image_size))}, patch {'x'.join(map(str, model.patch))}"
            f"{pool}, {config['model'].get('dtype', 'float32')}",
        ),
        ("reduction", _reduction(config["model"]["reduction"])),
        ("losses", _losses(recipe)),
        ("tokens", f"{model.patches + model.prefix} -> {tokens}"),
        ("curriculum", recipe.curriculum.describe()),
        ("total pruning ratio", f"{found['tpr']:.1%} of {model.patches} patches"),
        (
            "parameters",
            f"{found['params']:,} in training ({found['params_trained']:,} trained), "
            f"{found['params_slim']:,} slim",
        ),
        (
            "MACs per image",
            f"{found['macs_linear'] / 1e9:.4g} G linear, {found['macs_all'] / 1e9:.4g} G with the "
            "attention products",
        ),
    ]


def _training_rows(recipe: Recipe) -> list[tuple[str, Any]]:
    """Batches, steps, optimizer, devices."""
    config, rate = recipe.config, recipe.training.learning_rate
    accum, settings, size = config["accum_steps"], config["optimizer"], config["batch_size"]
    return [
        (
            "batch",
            f"{size} images = {jax.device_count()} devices x {accum} micro-batches x "
            f"{size // accum // jax.device_count()}",
        ),
        (
            "steps",
            f"{recipe.total_steps} = {recipe.total_steps / recipe.steps_per_epoch:.4g} epochs "
            f"of {recipe.steps_per_epoch}; warm-up {rate.warmup_steps}",
        ),
        (
            "learning rate",
            f"{settings['lr']:g} x {size}/{settings.get('lr_reference', 256)} = {rate.peak:g}, "
            f"{settings['schedule']} to {settings['min_lr']:g}, layer decay "
            f"{settings['layer_decay']:g}",
        ),
        (
            "AdamW",
            f"betas {tuple(settings['betas'])}, weight decay {settings['weight_decay']:g}, "
            f"clip {settings.get('clip_norm') or 'off'}, average {settings.get('ema') or 'off'}",
        ),
        *recipe.task.card(config),
        (
            "mesh",
            " x ".join(f"{axis} {size}" for axis, size in recipe.mesh.shape.items())
            + f" ({jax.devices()[0].device_kind}, {jax.process_count()} processes)",
        ),
        ("seed", config["seed"]),
        ("starts from", config["init"]),
        ("learns from", config["teacher"]),
    ]
