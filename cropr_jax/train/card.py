"""The resolved recipe in words, and what its model costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from cropr_jax import models
from cropr_jax.bench import flops
from cropr_jax.reducers import registry
from cropr_jax.train import logging, optimizer, routers
from cropr_jax.train.recipe import Recipe

MAIN_LOSSES = {"classification": "cross-entropy", "segmentation": "cross-entropy of pixels"}


def facts(recipe: Recipe) -> dict[str, Any]:
    """What the model costs: tokens after every site, TPR, parameters full and slim, MACs."""
    model = recipe.model
    height, width = model.grid
    params = models.abstract_params(model)
    slim = jax.eval_shape(lambda p: models.slim(model, p)[1], params)
    macs = flops.count(model.clone(slim=True))
    return {
        "tokens": list(model.schedule.tokens(height * width, model.prefix)),
        "tpr": model.schedule.tpr(height * width),
        "params": models.count(params),
        "params_slim": models.count(slim),
        "params_trained": sum(optimizer.flatten(params)[name].size for name in recipe.trainable),
        "macs_linear": macs.linear,
        "macs_all": macs.all,
    }


def _reduction(values: Mapping[str, Any]) -> str:
    """The method in words, with those options that are not its own defaults."""
    if values["name"] == "none":
        return "none"
    method = registry.method(values["name"])
    before = {"schedule": "", "rate": "R ", "fusion": "fusion "}
    words = [values["name"], *(f"{word}{values[k]}" for k, word in before.items() if k in values)]
    words += [
        f"{name} {value}"
        for name, value in values.get("options", {}).items()
        if value != getattr(method, name)
    ]
    return ", ".join(words)


def _losses(recipe: Recipe) -> str:
    """All losses in words."""
    model = recipe.model
    words = ["" if model.reduction == "none" else model.make_reducer().describe_losses]
    if routers.only(recipe.config):
        words += ["only the routers are trained"]
    if routers.from_model(recipe.config):
        words += ["targets are the predictions of the frozen model, unpruned"]
    return ", ".join(filter(None, [MAIN_LOSSES[recipe.config["task"]], *words]))


def _images(config: Mapping[str, Any]) -> tuple[str, str]:
    """What is done to training images, where it makes labels other than those of the data."""
    if "mixup" in config:
        return "mixing", ", ".join(f"{name} {value:g}" for name, value in config["mixup"].items())
    train = config["preprocess"]["train"]
    low, high = train["ratio_range"]
    return (
        "crops",
        f"of images in {'x'.join(map(str, train['resize_base']))} times {low:g} to {high:g}, one "
        f"class below {train['cat_max_ratio']:.0%}",
    )


def card(recipe: Recipe) -> str:
    """The resolved recipe in a table."""
    config, model, found = recipe.config, recipe.model, facts(recipe)
    height, width = model.grid
    accum = config.get("accum_steps", 1)
    settings = config["optimizer"]
    rows: list[tuple[str, Any]] = [
        (
            "data",
            f"{config['data'].get('name') or config['data']['source']}, {recipe.examples} "
            f"training images; " + ", ".join(f"{k} {v}" for k, v in recipe.eval_examples.items()),
        ),
        (
            "model",
            f"width {model.width}, depth {model.depth}, heads {model.heads}, image "
            f"{'x'.join(map(str, model.image_size))}, patch "
            f"{'x'.join(map(str, model.patch))}, pool {model.pool}, "
            f"{config['model'].get('dtype', 'float32')}",
        ),
        ("reduction", _reduction(config["model"]["reduction"])),
        ("losses", _losses(recipe)),
        (
            "tokens",
            f"{height * width + model.prefix} -> " + (" ".join(map(str, found["tokens"])) or "all"),
        ),
        ("curriculum", recipe.curriculum.describe()),
        ("total pruning ratio", f"{found['tpr']:.1%} of {height * width} patches"),
        (
            "parameters",
            f"{found['params']:,} in training ({found['params_trained']:,} trained), "
            f"{found['params_slim']:,} slim",
        ),
        (
            "evaluation",
            f"windows every {'x'.join(map(str, stride))} pixels, a pass each"
            if (stride := config["preprocess"].get("eval_stride"))
            else "",
        ),
        (
            "MACs per image",
            f"{found['macs_linear'] / 1e9:.4g} G linear, {found['macs_all'] / 1e9:.4g} G with the "
            "attention products",
        ),
        (
            "batch",
            f"{config['batch_size']} images = {jax.device_count()} devices x {accum} "
            f"micro-batches x {config['batch_size'] // accum // jax.device_count()}",
        ),
        (
            "steps",
            f"{recipe.total_steps} = {recipe.total_steps / recipe.steps_per_epoch:.4g} epochs "
            f"of {recipe.steps_per_epoch}; warm-up {recipe.schedule.warmup_steps}",
        ),
        (
            "learning rate",
            f"{settings['lr']:g} x {config['batch_size']}/"
            f"{settings.get('lr_reference', 256)} = {recipe.schedule.peak:g}, "
            f"{settings['schedule']} to {settings['min_lr']:g}, layer decay "
            f"{settings['layer_decay']:g}",
        ),
        (
            "AdamW",
            f"betas {tuple(settings['betas'])}, weight decay {settings['weight_decay']:g}, "
            f"clip {settings.get('clip_norm') or 'off'}, "
            f"average {settings.get('ema') or 'off'}",
        ),
        _images(config),
        (
            "mesh",
            " x ".join(f"{axis} {size}" for axis, size in recipe.mesh.shape.items())
            + f" ({jax.devices()[0].device_kind}, {jax.process_count()} processes)",
        ),
        ("seed", config["seed"]),
    ]
    rows += [
        (words, config[field])
        for field, words in (("init", "starts from"), ("teacher", "learns from"))
        if config.get(field)
    ]
    return logging.table([row for row in rows if row[1] != ""], "Recipe")
