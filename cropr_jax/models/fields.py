"""The fields of a config's model: what each may hold, and what it means."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from cropr_jax.core.fusion import FUSIONS
from cropr_jax.errors import ConfigError
from cropr_jax.host import schema
from cropr_jax.host.schema import FLAG, SIDE, SIZE, TEXT, Field, choice, number, whole
from cropr_jax.models import eva02, heads, vit
from cropr_jax.models.blocks import MLPS, POOLS
from cropr_jax.models.trunk import Trunk
from cropr_jax.reducers import registry

# By the name that configs use: variants, and the attributes in which all of them differ.
ARCHITECTURES = {"vit": vit, "eva02": eva02}
SCHEDULES = ("per_block", "three_stage", "aggressive")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
ATTENTION = ("auto", "xla", "cudnn")

# Height and width, or one number for both.
_SIZE = schema.either(SIDE, SIZE)
_DROP = number(0, 1, below=True)

MODEL: schema.Section = {
    "name": Field(choice(*ARCHITECTURES), "architecture"),
    "variant": Field(TEXT, "size by name, such as 'b'"),
    "head": Field(TEXT, "what the model predicts, by its task's name"),
    "reduction": Field(schema.SECTION, "method and schedule of token reduction"),
    "image_size": Field(_SIZE, "height and width of the images in pixels"),
    "patch": Field(_SIZE, "height and width of a patch in pixels"),
    "width": Field(whole(1, 2**16), "channels of a token"),
    "depth": Field(whole(1, 2**10), "blocks"),
    "heads": Field(whole(1, 2**10), "attention heads"),
    "num_classes": Field(whole(0, 2**20), "classes; 0 for as many as the data have"),
    "pool": Field(choice(*POOLS), "what of the tokens the head sees"),
    "mlp_ratio": Field(number(0, 64, above=True), "hidden width of the MLPs over the width"),
    "mlp": Field(choice(*MLPS), "kind of the MLPs"),
    "use_key_bias": Field(FLAG, "whether keys have a bias"),
    "rope_reference": Field(_SIZE, "patch grid whose rotary embeddings were learnt"),
    "prefix": Field(whole(0, 2**10), "tokens before the patches, CLS first"),
    "layer_scale": Field(number(0, 10), "first value of LayerScale"),
    "drop_path": Field(_DROP, "rate of drop path, that of the last block of the linear rule"),
    "drop_path_last_block": Field(_DROP, "rate of drop path of the last block"),
    "extra_proj": Field(FLAG, "whether the new block of a fusion has one projection more"),
    "num_queries": Field(whole(1, 2**20), "learned queries of a site"),
    "head_init_std": Field(number(0, 10), "standard deviation of the first weights of the head"),
    "remat": Field(FLAG, "compute activations again in the backward pass"),
    "attention": Field(choice(*ATTENTION), "kernel of attention"),
    "slim": Field(FLAG, "inference form"),
    "dtype": Field(choice(*DTYPES), "type that is computed in"),
}
REDUCTION: schema.Section = {
    "name": Field(TEXT, "method"),
    "schedule": Field(choice(*SCHEDULES), "after which blocks tokens are removed"),
    "rate": Field(whole(0, 2**20), "tokens that are removed at a site"),
    "fusion": Field(choice(*FUSIONS), "how pruned tokens come back before the last block"),
    "options": Field(schema.SECTION, "of the method"),
}
# Attributes of a model that follow from its reduction, or are Flax's own.
_MADE = ("schedule", "reducer_options", "fusion", "parent")


def _free(section: schema.Section) -> dict[str, Field]:
    """The same section with nothing that must be there: what is left out has a default."""
    return {name: field._replace(needed=False) for name, field in section.items()}


def of_reduction() -> dict[str, Field]:
    """Fields of a model's `reduction`."""
    return _free(REDUCTION)


def of_head(head: type[Trunk]) -> dict[str, Field]:
    """Fields of the models of a head; of those that only it has any value is taken."""
    known = _free(MODEL)
    own = {field.name for field in dataclasses.fields(head)}.difference(_MADE)
    beyond = {name: Field(schema.ANYTHING, f"of {head.__name__}", False) for name in own}
    config_only = {"name", "variant", "head", "reduction"}
    return {name: known.get(name) or beyond[name] for name in sorted(own | config_only)}


def of_options(method: str) -> dict[str, Field]:
    """Fields of the options of a method."""
    return _free(registry.option_fields(method))


def check(config: Mapping[str, Any]) -> None:
    """Refuses a model's unknown fields and values out of range, those of its reduction too.

    Raises:
      ConfigError: naming the field.
    """
    reduction = config.get("reduction") or {}
    sections = {
        "config.model": (of_head(heads.head_of(config)), config),
        "config.model.reduction": (of_reduction(), reduction),
    }
    if not isinstance(reduction, Mapping):
        raise ConfigError(f"config.model.reduction: found {reduction!r}, expected a section")
    method = reduction.get("name") or reduction.get("fusion")
    if isinstance(method, str) and method in registry.REDUCERS | registry.OF_FUSIONS:
        options = reduction.get("options") or {}
        sections["config.model.reduction.options"] = of_options(method), options
    for where, (section, values) in sections.items():
        schema.check_names(where, section, values)
        schema.check_values(where, section, values)
    if method in registry.REDUCERS | registry.OF_FUSIONS and reduction.get("rate") is None:
        raise ConfigError(f"config.model.reduction.rate is missing: how much {method!r} removes")
