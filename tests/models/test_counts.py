"""Golden counts: parameters and tokens of every variant, without computing anything."""

import jax
import pytest
from conftest import load_fixture

from cropr_jax import models
from cropr_jax.core.fusion import DENSE_FUSIONS

# Parameters with 1000 classes: unpruned, then for the paper's pruning rate with and without LLF the
# training form and the slim form.
COUNTS = {
    "ti": (16, 5_717_416, (10_615_736, 5_719_336), (11_105_568, 5_719_528)),
    "s": (16, 22_050_664, (37_735_544, 22_054_504), (39_304_032, 22_054_888)),
    "b": (16, 86_567_656, (141_520_376, 86_575_336), (147_015_648, 86_576_104)),
    "l": (8, 304_326_632, (511_651_288, 304_349_160), (521_075_136, 304_350_184)),
    "h": (8, 632_045_800, (1_064_075_800, 632_084_200), (1_078_476_800, 632_085_480)),
}


def create(variant, rate, fusion, **fields):
    reduction = {"name": "cropr", "rate": rate, "fusion": fusion}
    return models.create(
        {"variant": variant, "image_size": (224, 224), "num_classes": 1000}
        | {"reduction": reduction if rate else {"name": "none"}}
        | fields
    )


def counts(model):
    params = models.abstract_params(model)
    slim = jax.eval_shape(lambda p: models.slim_params(model, p), params)
    return models.count(params), models.count(slim)


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=pytest.mark.slow) if v in "hl" else v for v in COUNTS],
)
def test_parameters(variant):
    rate, unpruned, with_fusion, without = COUNTS[variant]
    assert set(COUNTS) == set(models.VARIANTS)
    assert counts(create(variant, 0, "none")) == (unpruned, unpruned)
    assert counts(create(variant, rate, "llf")) == with_fusion
    assert counts(create(variant, rate, "none")) == without


def test_slim_model_declares_the_slim_tree():
    model = create("ti", 16, "llf")
    slim = jax.eval_shape(lambda p: models.slim_params(model, p), models.abstract_params(model))
    declared = models.abstract_params(model.clone(slim=True))
    assert jax.tree.structure(declared) == jax.tree.structure(slim)
    assert jax.tree.leaves(declared) == jax.tree.leaves(slim)


@pytest.mark.parity
def test_parameters_of_the_released_code():
    reference = load_fixture("reference_counts")[1]["parameters"]
    found = {}
    for name, rate in (("B", 16), ("L", 8)):
        rows = COUNTS[name.lower()]
        found |= {
            f"ViT-{name}/16 @224, 1000 classes, unpruned": rows[1],
            f"ViT-{name}/16 @224, Cropr R={rate} + LLF, with auxiliary heads": rows[2][0],
            f"ViT-{name}/16 @224, Cropr R={rate} without LLF, with auxiliary heads": rows[3][0],
            f"ViT-{name}/16 @224, Cropr R={rate} + LLF, inference only (training=False: "
            "queries only)": rows[2][1],
        }
    ours = {name.removesuffix(" (log)"): n for name, n in reference.items() if "ViT" in name}
    assert found == ours


# Of the segmenter of the paper's Table "fusion", by fusion. A new block has a further projection.
FUSED = {
    "llf": 304_393_302,
    "cross_attn": 319_093_502,
    "token_concat": 304_393_302,
    "cross_attn_concat": 319_093_502,
    "mhsa_concat": 318_042_878,
    "dtop": 307_820_858,
}


def create_segmenter(**reduction):
    return models.create(
        {"name": "eva02", "variant": "l", "head": "segmentation", "image_size": 512, "patch": 16}
        | {"num_classes": 150, "reduction": reduction}
    )


def test_parameters_of_the_segmenter():
    assert counts(create_segmenter(name="none")) == (304_393_302, 304_393_302)
    cropr = create_segmenter(name="cropr", rate=40)
    assert counts(cropr) == (515_596_602, 304_415_830)
    assert tokens(cropr) == tuple(range(984, 143, -40))


@pytest.mark.parametrize("fusion", FUSED)
def test_parameters_of_fusions(fusion):
    # A method without parameters beside it, but for DToP, which brings its own.
    method = {} if fusion == "dtop" else {"name": "random"}
    model = create_segmenter(rate=40, fusion=fusion, **method)
    assert set(FUSED) == set(DENSE_FUSIONS)
    assert models.count(models.abstract_params(model)) == FUSED[fusion]
    assert tokens(model) == tuple(range(984, 143, -40))


def tokens(model):
    height, width = model.grid
    return model.schedule.tokens(height * width, model.prefix)


def test_tokens_of_vit_l():
    assert tokens(create("l", 8, "llf")) == tuple(range(188, 19, -8))
    assert tokens(create("l", 8, "none")) == tuple(range(188, 11, -8))
    reduction = {"name": "cropr", "schedule": "three_stage", "rate": 50, "fusion": "llf"}
    assert tokens(create("l", 8, "llf", reduction=reduction)) == (146, 96, 46)


@pytest.mark.parity
def test_tokens_of_the_released_code():
    reference = load_fixture("reference_counts")[1]["tokens_left_after_each_module_incl_cls"]
    cases = {name: left for name, left in reference.items() if name.startswith("ViT-")}
    assert cases
    for name, left in cases.items():
        variant, rate = name.split()[0][-1].lower(), int(name.split()[1].removeprefix("R="))
        fusion = "none" if "no LLF" in name else "llf"
        assert tokens(create(variant, rate, fusion)) == tuple(left), name


@pytest.mark.parity
def test_segmenters_of_the_released_code():
    _, reference = load_fixture("reference_counts")
    unpruned, cropr = create_segmenter(name="none"), create_segmenter(name="cropr", rate=40)
    ours = {"unpruned": counts(unpruned)[0], "with auxiliary heads": counts(cropr)[0]}
    cases = {name: n for name, n in reference["parameters"].items() if name.startswith("EVA-02-L")}
    assert cases
    for name, expected in cases.items():
        assert ours[next(form for form in ours if form in name)] == expected, name
    left = reference["tokens_left_after_each_module_incl_cls"]
    cases = {name: n for name, n in left.items() if name.startswith("EVA-02-L")}
    assert cases
    for name, expected in cases.items():
        assert tokens(cropr) == tuple(expected), name
