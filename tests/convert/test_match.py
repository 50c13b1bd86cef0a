"""Whether a file is a model's, by names and shapes."""

import re

import numpy as np
import pytest
import state_dicts
from state_dicts import CROPR, EVA02, VIT, made

from cropr_jax.convert.match import fit, match
from cropr_jax.convert.sources import recognise
from cropr_jax.convert.to_timm import rename
from cropr_jax.errors import ConfigError
from cropr_jax.models import Trunk


def test_ten_thousand_unknown_names():
    _, flat = made(VIT)
    state = rename(flat) | {f"blocks.0.x{i}": np.zeros(1) for i in range(10_000)}
    wanted = {name: leaf.shape for name, leaf in flat.items()}
    with pytest.raises(ConfigError, match="'blocks.0.x7' and 9992 more$"):
        match(recognise(state, 2), wanted, (4, 4), Trunk.fresh)


@pytest.mark.parametrize(
    "kind",
    [
        "timm",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("eva", "cropr", "big_vision", "vision_transformer")
        ),
    ],
)
def test_wrong_shapes_end_in_one_error(kind):
    """Every array in turn: zero-size, of another rank, of another size."""
    fields = {"eva": EVA02, "cropr": VIT | CROPR, "timm": VIT}.get(kind, VIT | {"pool": "cls"})
    model, flat = made(fields)
    if kind == "cropr":
        state = state_dicts.cropr_names(flat)
    elif kind in ("timm", "eva"):
        state = rename(flat)
        state = state_dicts.eva_names(state) if kind == "eva" else state
    else:
        state = state_dicts.flax_names(flat, kind == "big_vision")
    wanted = {name: leaf.shape for name, leaf in flat.items()}
    rng = np.random.default_rng(0)
    optional = r"(params/)?(head|fc_norm|norm|cropr|Transformer/encoder_norm)\b.*|.*rope.*"
    tried = 0
    for name in state:
        shapes = [(), (0,), (0, 16), (1, 2**40, 0), (3,) * 5, tuple(rng.integers(1, 20, 2))]
        shapes += [(2, 16, 16), (1, 8, 16), (1, 1, 5), (65, 1, 3, 16)]
        for shape in shapes:
            wrong = state | {name: np.zeros(shape, np.float32)}
            tried += 1
            try:
                source = recognise(wrong, model.heads)
                plan = match(source, wanted, model.grid, model.fresh)
                for taken in plan.taken:
                    array = source.leaves[taken].array
                    fit(taken, array, wanted[taken], source, model.grid, "timm")
            except ConfigError as error:
                assert len(str(error)) < 4000
            else:
                assert re.fullmatch(optional, name), (name, shape)
    assert tried > 250
