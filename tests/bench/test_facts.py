"""What is told of a model is the same wherever it is told: in the card of a run, in benchmarks."""

import numpy as np
import pytest
import tiny_config

from cropr_jax.bench import methods, off_the_shelf, throughput
from cropr_jax.bench.untrained import Variant
from cropr_jax.models import costs
from cropr_jax.train import card, recipe


@pytest.fixture(scope="module")
def resolved():
    return recipe.resolve(tiny_config.get_config())


def test_card(resolved):
    facts = costs.facts(resolved.model)
    assert card.facts(resolved) == facts | {"params_trained": facts["params"]}
    text = card.card(resolved)
    for told in (
        f"17 -> {' '.join(map(str, facts['tokens']))}",
        f"{facts['tpr']:.1%} of 16 patches",
        f"{facts['params']:,} in training ({facts['params']:,} trained)",
        f"{facts['params_slim']:,} slim",
        f"{facts['macs_linear'] / 1e9:.4g} G linear, {facts['macs_all'] / 1e9:.4g} G with",
    ):
        assert told in text


@pytest.mark.parametrize("stage", ["slim", "train_form", "train"])
def test_row_of_the_benchmark(resolved, stage):
    facts = costs.facts(resolved.model)
    names = {"params": "params_full"}
    row = throughput.model_facts(resolved.model, stage)
    assert row == {names.get(k, k): v for k, v in facts.items()} | {"fusion": "llf"}


def test_row_off_the_shelf():
    config = "vit,width=16,depth=3,heads=2,patch=4,res=16,classes=5,pool=cls,r=4,fusion=none"
    model = methods.create(config, "attn_topk", methods.Settings())
    facts = costs.facts(model)
    ranks = [np.zeros(4, np.int32)]
    row = off_the_shelf.make_row(Variant("attn_topk", "per_block", 4, "none"), model, ranks, None)
    assert {name: row[name] for name in ("macs_linear", "macs_all")} == {
        name: facts[name] for name in ("macs_linear", "macs_all")
    }
    assert row["removed"] == 17 - facts["tokens"][-1]
