"""EViT: the reference's numbers, and what its fused token is."""

import functools

import jax
import numpy as np
import pytest
import tokred
from conftest import fixture_names, load_fixture

from cropr_jax import models
from cropr_jax.convert.timm import params_from_state_dict
from cropr_jax.errors import ConfigError
from cropr_jax.reducers import Context
from cropr_jax.reducers.evit import EViT
from cropr_jax.reducers.registry import REDUCERS
from cropr_jax.tokens import from_features

PATCHES, KEEP = 8, 3


def draw():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, 1 + PATCHES, 4)).astype(np.float32)
    weights = np.exp(generator.normal(size=(2, 3, 1 + PATCHES))).astype(np.float32)
    return x, weights / weights.sum(-1, keepdims=True)


@functools.partial(jax.jit, static_argnums=(2, 3))
def apply(x, cls_row, keep, module):
    context = Context(cls_row=cls_row)
    return module.apply({}, from_features(x, (2, 4), 1), context, keep=keep, train=False)


def reduce(x, cls_row, keep, **options):
    """What a site returns, on the host."""
    return jax.device_get(apply(x, cls_row, keep, EViT(**options)))


def reference_model(meta, fuse):
    kwargs = meta["config"]["kwargs"]
    patches = (kwargs["img_size"] // kwargs["patch_size"]) ** 2
    counts = [int(rate * patches) + fuse for rate in meta["config"]["token_ratio"]]
    model = tokred.build(meta, "evit", counts).clone(reducer_options=(("fuse", fuse),))
    return model.clone(schedule=tokred.one_block_later(model.schedule))


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("tokred_evit") + fixture_names("tokred_topk"))
def test_token_reduction(name):
    """Attn Top-K between attention and MLP is EViT without its fused token."""
    arrays, meta = load_fixture(name)
    model = reference_model(meta, fuse="evit" in name)
    params = params_from_state_dict(tokred.strip(arrays, "w/"), model)
    _, out = tokred.run(model, params, arrays)
    first, *_ = meta["config"]["args"]["reduction_loc"]
    # There: positions among the patches that entered the site, -1 for the fused token.
    np.testing.assert_array_equal(out["kept"][0], arrays[f"out/viz.{first}/Kept_Tokens"])


def test_the_fused_token_is_the_attention_weighted_sum():
    """EVIT-1, EVIT-3: by hand, and no attention is lost."""
    x, cls_row = draw()
    kept, gone, _ = reduce(x, cls_row, KEEP)
    assert gone is None and kept.x.shape == (2, 1 + KEEP, 4)
    attention = cls_row.mean(1)
    for i in range(2):
        order = 1 + np.argsort(-attention[i, 1:], kind="stable")
        top, rest = order[: KEEP - 1], order[KEEP - 1 :]
        np.testing.assert_array_equal(kept.index[i], [*(top - 1), -1])
        np.testing.assert_array_equal(kept.x[i, :KEEP], x[i, np.array([0, *top])])
        np.testing.assert_allclose(kept.x[i, -1], attention[i, rest] @ x[i, rest], atol=1e-6)
        assert attention[i, rest].sum() < 0.9


def test_all_patches_may_be_fused_and_weights_normalised():
    """EVIT-2, EVIT-4: one token left; with weights of sum 1 it lies among those it is made of."""
    x, cls_row = draw()
    attention = cls_row.mean(1)[:, 1:]
    plain, _, _ = reduce(x, cls_row, 1)
    expected = np.einsum("br,brd->bd", attention, x[:, 1:])
    np.testing.assert_allclose(plain.x[:, 1], expected, atol=1e-6)
    normal, _, _ = reduce(x, cls_row, 1, renormalise=True)
    np.testing.assert_allclose(normal.x[:, 1], expected / attention.sum(1)[:, None], atol=1e-5)
    low, high = x[:, 1:].min(1), x[:, 1:].max(1)
    assert (normal.x[:, 1] >= low).all() and (normal.x[:, 1] <= high).all()


def test_without_fusing_it_is_attn_topk():
    """EVIT-5."""
    x, cls_row = draw()
    kept, gone, _ = reduce(x, cls_row, KEEP, fuse=False)
    same, rest, _ = apply(x, cls_row, KEEP, REDUCERS["attn_topk"]())
    np.testing.assert_array_equal(kept.x, same.x)
    np.testing.assert_array_equal(gone.index, rest.index)


def test_the_gradient_reaches_tokens_and_attention_of_the_fused():
    x, cls_row = draw()
    gradient = jax.grad(lambda x, row: apply(x, row, 1, EViT())[0].x[:, 1].sum(), argnums=(0, 1))
    to_x, to_row = jax.device_get(jax.jit(gradient)(x, cls_row))
    attention = cls_row.mean(1)[:, 1:, None]
    np.testing.assert_allclose(to_x[:, 1:], np.broadcast_to(attention, (2, 8, 4)), atol=1e-6)
    expected = np.repeat(x[:, 1:].sum(-1)[:, None] / 3, 3, 1)
    np.testing.assert_allclose(to_row[:, :, 1:], expected, atol=1e-5)


def test_fusion_is_refused_with_a_reason_unless_nothing_is_fused():
    reduction = {"name": "evit", "rate": 2, "fusion": "llf"}
    fields = {"width": 8, "depth": 3, "heads": 1, "patch": 4, "image_size": 16, "num_classes": 2}
    with pytest.raises(ConfigError, match="'evit' fuses what it prunes into one token"):
        models.create(fields | {"reduction": reduction})
    model = models.create(fields | {"reduction": reduction | {"options": {"fuse": False}}})
    assert model.fused
