"""Names of every kind of file: what they are here, and what is refused."""

import numpy as np
import pytest
import state_dicts
from state_dicts import CROPR, EVA02, VIT, made

from cropr_jax.convert import resample, sources
from cropr_jax.convert.to_timm import rename
from cropr_jax.errors import ConfigError

FUSED = EVA02 | {"mlp": "swiglu"}


def arrays_of(source):
    return {name: leaf.array for name, leaf in source.leaves.items()}


def check(source, flat, kind):
    assert source.kind == kind and not source.unknown
    found = arrays_of(source)
    assert found.keys() == flat.keys()
    for name, value in flat.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("fields", "name", "kind"),
    [
        (VIT, lambda flat: rename(flat), "timm"),
        (VIT | {"layer_scale": 1.0}, lambda flat: rename(flat), "timm"),
        (EVA02, lambda flat: rename(flat), "timm"),
        (FUSED, lambda flat: rename(flat), "timm"),
        (EVA02, lambda flat: state_dicts.eva_names(rename(flat)), "EVA"),
        (FUSED, lambda flat: state_dicts.eva_names(rename(flat)), "EVA"),
        (VIT | CROPR, state_dicts.cropr_names, "Cropr"),
        (EVA02 | CROPR | {"num_queries": 16}, state_dicts.cropr_names, "Cropr"),
        (VIT | {"pool": "cls"}, lambda f: state_dicts.flax_names(f, False), "vision_transformer"),
        (VIT, dict, "cropr_jax"),
    ],
)
def test_every_kind(fields, name, kind):
    _, flat = made(fields)
    check(sources.recognise(name(flat), 2), flat, kind)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "model."])
def test_prefixes_of_wrapped_models(prefix):
    _, flat = made(VIT)
    theirs = {prefix + name: value for name, value in rename(flat).items()}
    check(sources.recognise(theirs, 2), flat, "timm")


def test_big_vision_adds_positions_before_cls():
    """Its table has no entry for CLS: zeros there change nothing."""
    _, flat = made(VIT | {"pool": "cls"})
    flat["pos_embed"][:, 0] = 0
    theirs = state_dicts.flax_names(flat, True)
    theirs["params/pos_embedding"] = theirs["params/pos_embedding"][:, 1:]
    check(sources.recognise(theirs), flat, "big_vision")
    stacked = {k: v for k, v in theirs.items() if "encoderblock" not in k}
    for name in [name for name in theirs if "encoderblock_0" in name]:
        both = [theirs[name], theirs[name.replace("block_0", "block_1")]]
        stacked[name.replace("block_0", "block")] = np.stack(both)
    check(sources.recognise(stacked), flat, "big_vision")


def test_without_cls():
    _, flat = made(VIT | {"prefix": 0})
    del flat["fc_norm/scale"], flat["fc_norm/bias"]
    source = sources.recognise(state_dicts.flax_names(flat, True))
    check(source, flat, "big_vision")
    assert source.prefix == 0


@pytest.mark.parametrize(
    ("entries", "prefix", "held"),
    [(196, 1, 0), (197, 1, 1), (198, 2, 2), (197, 2, 1), (256, 1, 0), (257, 1, 1), (261, 5, 5)]
    + [(256, 5, 0), (257, 5, 1), (196, 0, 0), (253, 1, 1)],
)
def test_entries_for_prefix_tokens(entries, prefix, held):
    assert resample.held_prefix(entries, prefix) == held


@pytest.mark.parametrize(
    ("entries", "prefix", "grid", "held"),
    [(225, 1, (14, 16), 1), (225, 1, (15, 15), 0), (16, 5, (3, 5), 1), (20, 5, (3, 5), 5)],
)
def test_entries_for_prefix_tokens_of_a_known_grid(entries, prefix, grid, held):
    assert resample.held_prefix(entries, prefix, grid) == held


@pytest.mark.parametrize("name", sources.REGISTERS)
def test_registers_stand_behind_cls(name):
    _, flat = made(VIT | {"prefix": 5})
    flat["pos_embed"][:, 1:5] = 0
    theirs = rename(flat)
    theirs[name] = theirs.pop("reg_token")
    check(sources.recognise(theirs, 2), flat, "timm")  # a table with entries for all
    theirs["pos_embed"] = np.delete(theirs["pos_embed"], slice(1, 5), axis=1)
    check(sources.recognise(theirs, 2), flat, "timm")  # for CLS only


def test_what_pretraining_leaves():
    _, flat = made(VIT | {"pool": "cls", "num_classes": 0})
    theirs = rename(flat) | {
        "mask_token": np.zeros((1, 1, 8)),
        "decoder_pos_embed": np.zeros((1, 17, 8)),
        "decoder_blocks.0.attn.qkv.weight": np.zeros((24, 8)),
    }
    source = sources.recognise(theirs, 2)
    check(source, flat, "timm")
    assert len(source.left) == 3


def test_the_norm_of_mim_moves():
    _, flat = made(EVA02 | {"num_classes": 0})
    theirs = state_dicts.eva_names(rename(flat))
    for kind in ("weight", "bias"):
        theirs[f"norm.{kind}"] = theirs.pop(f"fc_norm.{kind}")
    theirs |= {"mask_token": np.zeros((1, 1, 16)), "lm_head.weight": np.zeros((4, 16))}
    source = sources.recognise(theirs, 2)
    check(source, flat, "EVA")
    assert source.leaves["fc_norm/scale"].source == "norm.weight"
    assert set(source.left) == {
        "mask_token",
        "lm_head.weight",
        "rope.freqs_cos",
        "rope.freqs_sin",
        "blocks.0.attn.rope.freqs_cos",
    }


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"blocks.0.attn.inner_attn_ln.weight": 16}, "'blocks.0.attn.inner_attn_ln.weight' shows"),
        ({"visual.blocks.0.norm1.weight": 16}, "'visual.blocks.0.norm1.weight' shows the image"),
        ({"blocks.0.gamma_1": 16}, "shows an EVA-01"),
        ({"module.norm.weight": 16, "norm.weight": 16}, "both mean"),
        ({"blocks.1.mlp.fc2.weight": (16, 16, 16, 16, 16)}, None),
        ({"blocks.1.attn.qkv.weight": (47, 16)}, r"'blocks.1.attn.qkv.weight' has shape \(47, 16"),
        ({"blocks.1.attn.qkv.weight": ()}, "'blocks.1.attn.qkv.weight' has shape"),
        ({"blocks.0.mlp.fc1.weight": ()}, None),
        ({"cls_token": ()}, None),
        ({"cls_token": (1, 2**40, 8), "pos_embed": (1, 1, 16)}, "expected the same width"),
        ({"pos_embed": (2, 17, 16)}, None),
    ],
)
def test_refused_or_left_to_the_comparison(more, message):
    """A wrong shape may pass here only to be found when it is compared with the model's."""
    _, flat = made(VIT)
    zero = np.zeros(())  # repeated, so that no shape takes memory
    theirs = rename(flat) | {name: np.broadcast_to(zero, shape) for name, shape in more.items()}
    if message is None:
        sources.recognise(theirs, 2)
        return
    with pytest.raises(ConfigError, match=message):
        sources.recognise(theirs, 2)


def test_pooling_by_attention_is_refused():
    _, flat = made(VIT)
    theirs = state_dicts.flax_names(flat, True) | {"params/MAPHead_0/probe": np.zeros((1, 1, 16))}
    with pytest.raises(ConfigError, match="'MAPHead_0/probe' shows a ViT that pools by attention"):
        sources.recognise(theirs)


def test_a_head_with_a_hidden_layer_is_left():
    _, flat = made(VIT | {"pool": "cls"})
    theirs = state_dicts.flax_names(flat, False) | {"pre_logits/kernel": np.zeros((16, 16))}
    source = sources.recognise(theirs)
    assert set(source.left) == {"pre_logits/kernel", "head/kernel", "head/bias"}


def test_unknown_names_are_collected():
    _, flat = made(VIT)
    source = sources.recognise(rename(flat) | {"dist_token": np.zeros((1, 1, 16))}, 2)
    assert source.unknown == ("dist_token",)


def test_numbers_in_names_may_be_long():
    """Python refuses to read one of more than 4300 digits."""
    _, flat = made(VIT | {"pool": "cls"})
    digits = "1" * 5000
    for names, name in (
        (
            state_dicts.flax_names(flat, True),
            f"Transformer/encoderblock_0/LayerNorm_{digits}/scale",
        ),
        (
            state_dicts.flax_names(flat, True),
            f"Transformer/encoderblock_{digits}/LayerNorm_0/scale",
        ),
        (rename(flat), f"blocks.{digits}.norm1.weight"),
    ):
        source = sources.recognise(names | {name: np.zeros(16)}, 2)
        lengths = map(len, (*source.unknown, *source.leaves))
        assert max(lengths) > 5000


def test_other_models_are_named():
    with pytest.raises(ConfigError, match="no ViT known here: 'layer1.0', 'fc' and 0|'layer1.0'"):
        sources.recognise({"layer1.0": np.zeros(1), "fc": np.zeros(1)})


def test_heads_by_width():
    assert [sources.guess_heads(*size) for size in ((192, 12), (1024, 24), (1280, 32))] == [
        3,
        16,
        16,
    ]
    assert sources.guess_heads(1280, 12) == 20
    with pytest.raises(ConfigError, match="cannot be told from a width of 16"):
        sources.guess_heads(16, 2)
