"""Models of JoakimHaurum/TokenReduction's fixtures in our form."""

import jax
import numpy as np

from cropr_jax import models
from cropr_jax.convert.timm import from_state_dict
from cropr_jax.core import schedule

TOKENS = 5e-5


def strip(arrays, prefix):
    """Arrays whose name starts with `prefix`, without it."""
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def linear(weights, name):
    """A PyTorch linear layer as ours."""
    return {"kernel": weights[f"{name}.weight"].T, "bias": weights[f"{name}.bias"]}


def norm(weights, name):
    """A PyTorch layer norm as ours."""
    return {"scale": weights[f"{name}.weight"], "bias": weights[f"{name}.bias"]}


def build(meta, reduction, counts):
    """Our model: the method before the same blocks, leaving `counts` patch tokens."""
    kwargs, blocks = meta["config"]["kwargs"], meta["config"]["args"]["reduction_loc"]
    side = kwargs["img_size"] // kwargs["patch_size"]
    model = models.create(
        {
            "image_size": kwargs["img_size"],
            "patch": kwargs["patch_size"],
            "width": kwargs["embed_dim"],
            "depth": kwargs["depth"],
            "heads": kwargs["num_heads"],
            "num_classes": kwargs["num_classes"],
            "pool": "cls",
            "reduction": {"name": reduction, "rate": 1, "fusion": "none"},
        }
    )
    counts = [int(count) for count in counts]
    return model.clone(schedule=schedule.to_counts(model.depth, side**2, blocks, counts))


def params(arrays, meta, modules, convert):
    """Our parameters.

    Args:
      arrays: of the fixture.
      meta: its description.
      modules: name of the list of reduction modules there.
      convert: weights of one module to our parameters of a site.
    """
    weights = strip(arrays, "w/")
    backbone = {k: v for k, v in weights.items() if not k.startswith(f"{modules}.")}
    tree = from_state_dict(backbone, meta["config"]["kwargs"]["num_heads"])
    for site in range(len(meta["config"]["args"]["reduction_loc"])):
        tree[f"reducer_{site}"] = convert(strip(weights, f"{modules}.{site}."))
    return jax.tree.map(lambda leaf: np.array(leaf, order="C"), tree)


def run(model, tree, arrays):
    """Logits and outputs; checks them and the tokens of all blocks against the fixture."""
    images = np.ascontiguousarray(arrays["in/x"].transpose(0, 2, 3, 1))
    logits, out = jax.jit(lambda p, x: model.apply({"params": p}, x))(tree, images)
    np.testing.assert_allclose(logits, arrays["out/logits"], atol=TOKENS)
    for block, features in enumerate(out["features"]):
        np.testing.assert_allclose(
            features, arrays[f"out/block.{block}"], atol=TOKENS, err_msg=f"block {block}"
        )
    return logits, out


def one_block_later(made):
    """The schedule of a method that acts within the block, not before it."""
    sites = tuple((block + 1, removed) for block, removed in made.sites)
    return schedule.Schedule(made.depth, sites)
