"""The predictor: equal to the full model, compiled once for a shape, light to import."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from PIL import Image

import cropr_jax
from cropr_jax import models
from cropr_jax.errors import CheckpointError, ConfigError
from cropr_jax.models import costs, slim_leaves
from cropr_jax.runs.writer import Checkpoints
from cropr_jax.tasks.classification.predictor import ClassificationPredictor
from cropr_jax.tasks.predictor import Predictor
from cropr_jax.train.state import TrainState

CONFIG = {
    "width": 32,
    "depth": 3,
    "heads": 2,
    "patch": 4,
    "image_size": (16, 24),
    "num_classes": 7,
    "reduction": {"name": "cropr", "rate": 5, "fusion": "llf"},
}
PREPROCESS = {
    "res": (16, 24),
    "mean": (0.5, 0.4, 0.3),
    "std": (0.2, 0.3, 0.25),
    "interpolation": "bicubic",
    "crop_ratio": 0.875,
}
MULTI_HEAD = {"heads": 2, "projections": True, "pre_norm": True}


@functools.cache
def made():
    return make()


def make(**fields):
    """A model and made-up parameters, large enough that everything matters; nothing compiled."""
    model = models.create(CONFIG | fields)
    random = np.random.default_rng(0)
    return model, jax.tree.map(
        lambda leaf: jnp.asarray(0.2 * random.standard_normal(leaf.shape, np.float32)),
        models.abstract_params(model),
    )


def images(count=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 16, 24, 3), np.uint8)


def normalized(pixels):
    mean, std = np.float32(PREPROCESS["mean"]), np.float32(PREPROCESS["std"])
    return (pixels.astype(np.float32) / 255 - mean) / std


@pytest.mark.parametrize(("num_queries", "options"), [(1, {}), (64, {}), (64, MULTI_HEAD)])
def test_slim_equals_full(num_queries, options):
    reduction = CONFIG["reduction"] | {"options": options}
    model, params = make(num_queries=num_queries, reduction=reduction)
    pixels = normalized(images())
    full, out = jax.jit(lambda p, x: model.apply({"params": p}, x))(params, pixels)
    logits, slim_out = Predictor.from_model(model, params).predict(pixels)
    np.testing.assert_allclose(logits, full, atol=1e-5, rtol=0)
    for name in ("kept", "pruned"):
        for ours, theirs in zip(slim_out[name], out[name], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(slim_out["pruned_after"], out["pruned_after"])


def test_bfloat16_casts_change_nothing():
    model, params = make(dtype="bfloat16", layer_scale=0.1)
    pixels = normalized(images())
    slim, slim_params = models.slim(model, params)
    expected, _ = jax.jit(lambda p, x: slim.apply({"params": p}, x))(slim_params, pixels)
    predictor = Predictor.from_model(model, params)
    np.testing.assert_array_equal(predictor(pixels), expected)
    flat = traverse_util.flatten_dict(predictor.params, sep="/")
    assert flat["block_0/mlp/fc1/kernel"].dtype == jnp.bfloat16
    assert flat["reducer_0/scorer/query"].dtype == jnp.float32
    assert flat["block_0/norm1/scale"].dtype == jnp.float32


def test_compiled_program_has_no_auxiliary_work():
    """Nor a product of queries and tokens: the FLOPs do not depend on the number of queries."""
    found = []
    for num_queries in (1, 256):
        model = models.create(CONFIG | {"width": 256, "num_queries": num_queries})
        slim = jax.eval_shape(
            lambda p, model=model: models.slim_params(model, p), models.abstract_params(model)
        )
        slim_model = model.clone(slim=True)
        compiled = (
            jax.jit(lambda p, x, model=slim_model: model.apply({"params": p}, x)[0])
            .lower(slim, jax.ShapeDtypeStruct((2, 16, 24, 3), jnp.float32))
            .compile()
        )
        found.append(compiled.cost_analysis()["flops"])
        # One site of 256 queries and 25 tokens alone would add 2 %, its aggregator 50 %.
        assert found[-1] == pytest.approx(2 * 2 * costs.count(slim_model).all, rel=0.05)
    assert found[0] == found[1]


def test_compiles_once_for_a_shape():
    compiled = []

    def listen(name, seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    model, params = made()
    predictor = Predictor.from_model(model, params, PREPROCESS)
    first, second = images(3), images(3, seed=1)
    assert all(seconds > 0 for seconds in predictor.warm_up(3))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        predictor(first), predictor(second)
        assert predictor.warm_up(3) == (0.0, 0.0)
        assert not compiled
        predictor(first[:2])
        assert len(compiled) == 1
    finally:
        jax.monitoring.clear_event_listeners()


def test_uint8_equals_float():
    model, params = made()
    predictor = Predictor.from_model(model, params, PREPROCESS)
    pixels = images()
    np.testing.assert_allclose(predictor(pixels), predictor(normalized(pixels)), atol=1e-5)
    np.testing.assert_allclose(predictor(pixels), predictor(jnp.asarray(pixels)), atol=0)


def test_preprocessing(tmp_path):
    model, params = made()
    names = [f"class {i}" for i in range(7)]
    predictor = ClassificationPredictor.from_model(model, params, PREPROCESS, names)
    large = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    Image.fromarray(large).save(tmp_path / "a.png")
    grey = Image.fromarray(large[:, :, 0])
    prepared = predictor.prepare([tmp_path / "a.png", large, grey])
    assert prepared.shape == (3, 16, 24, 3) and prepared.dtype == np.uint8
    np.testing.assert_array_equal(prepared[0], prepared[1])
    logits = predictor([str(tmp_path / "a.png"), large, grey], preprocess=True)
    np.testing.assert_array_equal(logits, predictor(prepared))

    best = predictor.top(logits, k=2)
    assert best[0][0][0] == f"class {int(logits[0].argmax())}"
    assert best[0][0][1] >= best[0][1][1]


def test_random_pruning_needs_no_keys():
    model, params = make(reduction={"name": "random", "rate": 5, "fusion": "none"})
    predictor = Predictor.from_model(model, params)
    pixels = normalized(images())
    np.testing.assert_array_equal(predictor(pixels), predictor(pixels))


def test_merging_methods_say_where_each_patch_went():
    model, params = make(reduction={"name": "tome", "rate": 5, "fusion": "none"})
    _, out = Predictor.from_model(model, params).predict(normalized(images()))
    assert "pruned_after" not in out and not out["pruned"]
    last, group = np.asarray(out["kept"][-1]), np.asarray(out["group"])
    assert group.shape == (3, 4, 6)
    for places, patches in zip(last, group.reshape(3, -1), strict=True):
        assert set(patches) == set(range(len(places)))
        alone = np.flatnonzero(places >= 0)
        assert 0 < len(alone) < len(places)
        np.testing.assert_array_equal(patches[places[alone]], alone)


def test_wrong_input():
    model, params = made()
    predictor = Predictor.from_model(model, params)
    with pytest.raises(ValueError, match=r"expected \[b, 16, 24, 3\]"):
        predictor(np.zeros((1, 8, 8, 3), np.float32))
    with pytest.raises(ValueError, match=r"one path, 'cat.jpg': pass a list .*predictor\(\['cat"):
        predictor("cat.jpg", preprocess=True)
    with pytest.raises(ValueError, match="int32, expected uint8 or float32"):
        predictor(np.zeros((1, 16, 24, 3), np.int32))
    with pytest.raises(ValueError, match="preprocess=True"):
        predictor(["cat.jpg"])
    with pytest.raises(ConfigError, match="preprocess settings"):
        predictor(images())
    with pytest.raises(ConfigError, match="use from_model"):
        Predictor(model, params)
    with_settings = ClassificationPredictor.from_model(model, params, PREPROCESS)
    with pytest.raises(ConfigError, match="'cat.jpg' cannot be read"):
        with_settings(["cat.jpg"], preprocess=True)


@pytest.mark.parametrize("options", [{}, MULTI_HEAD])
def test_load_reads_no_auxiliary_leaves(tmp_path, options):
    """The checkpoint holds none of them, and loading does not notice."""
    reduction = CONFIG["reduction"] | {"options": options}
    model, params = make(reduction=reduction)
    needed = traverse_util.flatten_dict(slim_leaves(model), sep="/")
    assert not any("aggregator" in name or "auxiliary_head" in name for name in needed)
    assert "reducer_0/scorer/queries" in needed

    stored = traverse_util.flatten_dict(params, sep="/")
    stored = {name: leaf for name, leaf in stored.items() if name in needed}
    state = TrainState(jnp.int32(5), traverse_util.unflatten_dict(stored, sep="/"), {}, None)
    with Checkpoints(tmp_path, "top1") as writer:
        writer.save(5, state)
    fields = CONFIG | {"reduction": reduction}
    config = {"task": "classification", "model": fields, "preprocess": PREPROCESS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "run.json").write_text(json.dumps({"class_names": list("abcdefg")}))

    expected = Predictor.from_model(model, params, PREPROCESS)(images())
    for path in (tmp_path, tmp_path / "checkpoints" / "5"):
        predictor = cropr_jax.load(path)
        assert isinstance(predictor, ClassificationPredictor)
        np.testing.assert_array_equal(predictor(images()), expected)
        assert predictor.class_names == tuple("abcdefg")
    half = cropr_jax.load(tmp_path, dtype="bfloat16")
    assert half.params["head"]["kernel"].dtype == jnp.bfloat16


def test_load_refuses_what_is_no_run(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        cropr_jax.load(tmp_path)


def test_imports_are_light():
    """Model, predictor and benchmark come up where only jax, flax, optax and einops are."""
    program = """
import sys
import cropr_jax
assert "jax" not in sys.modules, "import cropr_jax alone must not import jax"
import einops, flax, jax, optax
for name in sys.argv[1:]:
    sys.modules[name] = None  # flax itself imports absl; we may not
import cropr_jax.models, cropr_jax.tasks, cropr_jax.bench, cropr_jax.bench.__main__
assert cropr_jax.load is cropr_jax.runs.load.load
"""
    blocked = (
        "tensorflow tensorflow_datasets grain ml_collections absl orbax matplotlib PIL sklearn"
    )
    subprocess.run([sys.executable, "-c", program, *blocked.split(), "tqdm"], check=True)
