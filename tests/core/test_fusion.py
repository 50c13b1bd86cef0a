"""Fusion of pruned tokens: where they come back, and what they may still change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params
from flax.traverse_util import flatten_dict, unflatten_dict

from cropr_jax import models
from cropr_jax.core import fusion, routing
from cropr_jax.errors import ConfigError
from cropr_jax.models.blocks import Block
from cropr_jax.tokens import Tokens, concatenate

GRID = (3, 5)
PATCHES = 15
NEW = sorted(fusion.NEW_BLOCKS)


def build(name="random", how="llf", rate=2, **fields):
    """A model of four blocks, with sites after the first two."""
    reduction = {"fusion": how, "rate": rate} | ({} if how == "dtop" else {"name": name})
    return models.create(
        {
            "head": "segmentation",
            "width": 16,
            "depth": 4,
            "heads": 2,
            "patch": 4,
            "image_size": (12, 20),
            "num_classes": 3,
            "reduction": {"name": "none"} if name == "none" else reduction,
        }
        | fields
    )


def images():
    return jnp.asarray(np.random.default_rng(0).normal(size=(2, 12, 20, 3)), jnp.float32)


@functools.cache
def compiled(model):
    return jax.jit(lambda params, x: model.apply({"params": params}, x))


@functools.cache
def case(how):
    """A model, its parameters and what they give, as every test of that fusion has them."""
    model = build("cropr", how)
    params = random_params(model)
    return model, params, *jax.device_get(compiled(model)(params, images()))


@functools.cache
def lesson(how):
    """Of that case in training: what else comes out, and the gradients of its sites' losses."""
    model, params, _, _ = case(how)

    def auxiliary(params, x):
        _, out = model.apply({"params": params}, x, train=True)

        def criterion(logits, places):
            assert (how == "llf") == (places is None)  # DToP's rows are of the patches left there
            return (logits**2).sum()

        return sum(model.reducer_losses(out, criterion).values()), out

    gradients, out = jax.jit(jax.grad(auxiliary, has_aux=True))(params, images())
    return jax.device_get((out, gradients))


def edit(params, prefix, change):
    """Parameters with `change` applied to all whose name starts with `prefix`."""
    flat = flatten_dict(params, sep="/")
    return unflatten_dict(
        {name: change(x) if name.startswith(prefix) else x for name, x in flat.items()}, sep="/"
    )


def passing(params, block):
    """With a block that adds nothing."""
    for branch in ("attn/out", "mlp/down", "mlp/fc2"):
        params = edit(params, f"{block}/{branch}/", np.zeros_like)
    return params


def without(params, *names):
    return {name: value for name, value in params.items() if not name.startswith(names)}


def exits(out):
    """(site, image, raster index, feature) of all pruned tokens, the feature as it was then."""
    before = [np.tile(np.arange(PATCHES), (2, 1)), *map(np.asarray, out["kept"])]
    for site, pruned in enumerate(out["pruned"]):
        for image, indices in enumerate(np.asarray(pruned)):
            for index in indices:
                place = 1 + int(np.flatnonzero(before[site][image] == index)[0])
                yield site, image, index, np.asarray(out["features"][site][image, place])


def norm(x, epsilon=1e-6):
    return (x - x.mean()) / np.sqrt(x.var() + epsilon)


def project(x, norm_params, head, epsilon=1e-6):
    normed = norm(x, epsilon) * norm_params["scale"] + norm_params["bias"]
    return normed @ head["kernel"] + head["bias"]


# Tokens as they are after the last block, for fusions alone: six kept, the others pruned.
def tokens(seed=0):
    rng = np.random.default_rng(seed)
    index = np.stack([rng.permutation(PATCHES) for _ in range(2)]).astype(np.int32)
    x = rng.normal(size=(2, 1 + PATCHES, 16)).astype(np.float32)
    kept = Tokens(x=x[:, :7], index=index[:, :6], grid=GRID, prefix=1)
    sites = [
        Tokens(x=x[:, 1 + a : 1 + b], index=index[:, a:b], grid=GRID)
        for a, b in ((6, 10), (10, 15))
    ]
    return jax.device_put((kept, sites))


def block(**kwargs):
    return Block(
        heads=2,
        hidden=42,
        mlp="swiglu_norm",
        use_key_bias=False,
        rope_reference=(16, 16),
        prefix=1,
        **kwargs,
    )


def params_of(module, *args, **kwargs):
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *args, **kwargs))["params"]
    return jax.tree.map(lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype("f4"), shapes)


@functools.cache
def new_block(how):
    """A fusion alone, tokens for it, and parameters."""
    module = fusion.NEW_BLOCKS[how](block(parent=None))
    kept, pruned = tokens()
    return module, kept, pruned, params_of(module, kept, pruned)


join = jax.jit(lambda kept, pruned: concatenate(kept, *pruned))
move = jax.jit(lambda tokens, order: routing.split(tokens, order, tokens.patches)[0])


def shuffled(tokens):
    """The same tokens in another order of patches, another one for each image."""
    rng = np.random.default_rng(2)
    order = np.stack([rng.permutation(tokens.patches) for _ in range(2)]).astype(np.int32)
    return move(tokens, order)


@pytest.mark.parametrize("how", ["llf", "token_concat", "mhsa_concat", "dtop"])
def test_a_rate_of_zero_changes_nothing_but_adds_the_new_block(how):
    """LLF-1, MC-2, DT-3: fusions without queries of their own end in the unpruned network."""
    model = build("cropr", how, rate=0, extra_proj=False)
    params = random_params(model)
    logits, out = compiled(model)(params, images())
    assert [kept.shape[1] for kept in out["kept"]] == [PATCHES] * 2
    backbone = without(params, "reducer_", "fusion")
    plain = build("none", depth=4 + (how == "mhsa_concat"))
    if how == "mhsa_concat":
        backbone["block_4"] = params["fusion"]["block"]
    expected, _ = compiled(plain)(backbone, images())
    np.testing.assert_allclose(logits, expected, atol=2e-5)


@pytest.mark.parametrize("how", fusion.DENSE_FUSIONS)
def test_every_place_gets_one_prediction_of_its_own_image(how):
    """LLF-2, LLF-6, CA-2, DT-2."""
    model, params, logits, out = case(how)
    assert logits.shape == (2, *GRID, 3) and np.isfinite(logits).all()
    index = np.concatenate([out["kept"][-1], *out["pruned"]], axis=1)
    np.testing.assert_array_equal(np.sort(index, 1), np.tile(np.arange(PATCHES), (2, 1)))
    assert not np.array_equal(index[0], index[1])
    reverse, _ = jax.device_get(compiled(model)(params, np.asarray(images())[::-1]))
    np.testing.assert_allclose(reverse[::-1], logits, atol=1e-5)
    if how in fusion.NEW_BLOCKS:
        for rate in (0, 1, 5):
            other = build("cropr", how, rate)
            shapes = jax.eval_shape(compiled(other), models.abstract_params(other), images())
            assert shapes[0].shape == logits.shape


def test_llf_with_an_idle_last_block_is_token_concat():
    """LLF-3."""
    model, params, _, _ = case("llf")
    idle = passing(params, "block_3")
    expected, _ = compiled(case("token_concat")[0])(idle, images())
    np.testing.assert_allclose(compiled(model)(idle, images())[0], expected, atol=1e-6)


def test_llf_ignores_the_order_of_tokens():
    """LLF-4, with the rotary embeddings that tokens carry along."""
    kept, pruned = tokens()
    every = jax.jit(fusion.last_layer_fusion)(kept, pruned)
    module = block()
    params = params_of(module, every, None, method="attend")

    @jax.jit
    def restored(every):
        after, _ = module.apply({"params": params}, every, None, method="attend")
        return routing.raster_order(after).x

    np.testing.assert_allclose(restored(shuffled(every)), restored(every), atol=1e-5)


@pytest.mark.parametrize("how", ["llf", "token_concat"])
def test_no_parameters_are_added(how):
    """LLF-5."""
    found, plain = (
        models.abstract_params(build("random", how)),
        models.abstract_params(build("none")),
    )
    assert jax.tree.map(lambda x: x.shape, found) == jax.tree.map(lambda x: x.shape, plain)


def test_token_concat_predicts_from_what_left():
    """TC-1."""
    _, params, logits, out = case("token_concat")
    seen = list(exits(out))
    assert len(seen) == 10
    for _, image, index, feature in seen:
        expected = project(feature, params["norm"], params["head"])
        found = logits[image].reshape(PATCHES, 3)[index]
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_token_concat_stops_at_the_site():
    """TC-2: later blocks learn nothing from the prediction of a pruned token."""
    model, params, _, out = case("token_concat")
    first = out["pruned"][0][0, 0]

    def logit(p):
        return model.apply({"params": p}, images())[0][0].reshape(PATCHES, 3)[first].sum()

    found = jax.jit(jax.grad(logit))(params)
    largest = [
        max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(found[f"block_{i}"]))
        for i in range(4)
    ]
    assert largest[0] > 1e-3 and largest[1:] == [0, 0, 0]


@pytest.mark.parametrize("how", NEW)
def test_what_the_new_block_sees(how):
    """CA-1: pruned tokens get a gradient in all but Cross-Attn."""
    module, kept, pruned, params = new_block(how)

    def total(kept_x, pruned_x):
        sites = [site.replace(x=x) for site, x in zip(pruned, pruned_x, strict=True)]
        after = module.apply({"params": params}, kept.replace(x=kept_x), sites)
        return (routing.raster_order(after).x[:, 0] ** 2).sum()

    of_kept, of_pruned = jax.jit(jax.grad(total, argnums=(0, 1)))(
        kept.x, [site.x for site in pruned]
    )
    assert np.abs(of_kept).max() > 1e-4
    for gradient in of_pruned:
        assert (np.abs(gradient).max() > 1e-4) == (how != "cross_attn")


@pytest.mark.parametrize("how", NEW)
def test_the_new_block_ignores_the_order_of_tokens(how):
    """CA-3, and the same of the others."""
    module, kept, pruned, params = new_block(how)

    @jax.jit
    def restored(kept, pruned):
        return routing.raster_order(module.apply({"params": params}, kept, pruned)).x

    expected = restored(kept, pruned)
    assert expected.shape == (2, PATCHES, 16)
    other = restored(shuffled(kept), [shuffled(site) for site in pruned])
    np.testing.assert_allclose(other, expected, atol=1e-5)
    if how == "cross_attn":
        return
    every = jax.device_get(shuffled(join(kept, pruned)))
    mixed = kept.replace(x=every.x[:, :7], index=every.index[:, :6])
    rest = [pruned[0].replace(x=every.x[:, 7:], index=every.index[:, 6:])]
    np.testing.assert_allclose(restored(mixed, rest), expected, atol=1e-5)


def test_mhsa_concat_with_an_idle_block_is_token_concat():
    """MC-1; with the further projection, that of Token Concat's tokens."""
    module, kept, pruned, params = new_block("mhsa_concat")
    params = passing(params, "block")
    found = jax.jit(lambda p: module.apply({"params": p}, kept, pruned))(params)
    expected = jax.device_get(jax.jit(fusion.token_concat)(kept, pruned))
    np.testing.assert_array_equal(found.index, expected.index)
    x = expected.x[:, 1:] @ params["proj"]["kernel"] + params["proj"]["bias"]
    np.testing.assert_allclose(found.x, x, atol=1e-5)

    plain = fusion.SelfAttentionConcat(block(parent=None), extra_proj=False)
    same = jax.jit(lambda p: plain.apply({"params": p}, kept, pruned))(without(params, "proj"))
    np.testing.assert_array_equal(same.x, expected.x[:, 1:])


def test_dtop_keeps_the_logits_of_the_site():
    """DT-1, and that the surest leave."""
    _, params, logits, out = case("dtop")
    seen = list(exits(out))
    assert len(seen) == 10
    for site, image, index, feature in seen:
        head = params[f"reducer_{site}"]["auxiliary_head"]
        expected = project(feature, head["norm"], head["linear"], epsilon=1e-5)
        found = logits[image].reshape(PATCHES, 3)[index]
        np.testing.assert_allclose(found, expected, atol=1e-4)

    trained, _ = lesson("dtop")
    softmax = jax.jit(jax.nn.softmax)
    for site, result in enumerate(trained["sites"]):
        confidence = np.asarray(softmax(result["auxiliary"])).max(-1)
        for image in range(2):
            surest = np.argsort(-confidence[image])[: trained["pruned"][site].shape[1]]
            gone = np.asarray(result["places"])[image][surest]
            assert set(gone) == set(np.asarray(trained["pruned"][site])[image])


@pytest.mark.parametrize("how", ["dtop", "llf"])
def test_only_dtop_teaches_the_backbone_by_its_sites(how):
    """DT-4; the losses of Cropr's sites stop at them."""
    _, found = lesson(how)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(found["block_0"]))
    assert (largest > 1e-3) == (how == "dtop")
    assert largest == 0 or how == "dtop"


def refused(message, head="segmentation", **reduction):
    with pytest.raises(ConfigError, match=message):
        build(head=head, reduction={"rate": 2} | reduction)


def test_refusals():
    refused("'dtop' prunes by its own .* found 'cropr'", name="cropr", fusion="dtop")
    refused("'dtop' prunes by its own .* found 'none'", name="none", fusion="dtop")
    refused("'dtop' prunes by its own .* found 'llf'", name="dtop", fusion="llf")
    refused(
        "'mhsa_concat' restores the image", "classification", name="cropr", fusion="mhsa_concat"
    )
    refused("'dtop' restores the image", "classification", fusion="dtop")
    refused("found 'none', which prunes nothing", name="none", fusion="token_concat")
    refused("fusion: found 'concat', expected one of 'llf'", name="cropr", fusion="concat")
