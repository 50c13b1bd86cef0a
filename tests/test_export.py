"""Exported predictors: the same logits elsewhere, and clear words where they cannot be."""

import functools
import json
import re
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import DATA, random_params
from PIL import Image

from cropr_jax import export, models
from cropr_jax.convert.timm import params_from_state_dict
from cropr_jax.errors import ConfigError
from cropr_jax.exported import load_exported
from cropr_jax.models.export import tokens_after
from cropr_jax.reducers.registry import REDUCERS
from cropr_jax.runs.writer import Checkpoints
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
EVA02 = {"name": "eva02", "mlp": "swiglu_norm", "rope_reference": 16, "layer_scale": 0.1}
RANDOM = {"depth": 2, "reduction": {"name": "random", "rate": 5, "fusion": "none"}}
BFLOAT16 = {"depth": 2, "dtype": "bfloat16"}


@functools.cache
def make(fields="{}", preprocess=True):
    """A predictor with made-up parameters; `fields` as JSON."""
    model = models.create(CONFIG | json.loads(fields))
    settings = PREPROCESS if preprocess else None
    names = [f"class {i}" for i in range(7)] if preprocess else ()
    return Predictor.from_model(model, random_params(model), settings, names)


def images(count, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 16, 24, 3), np.uint8)
    pixels[:, 4:12, :16] = 77
    return pixels


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Path of an artefact that no test changes."""
    path = tmp_path_factory.mktemp("export") / "model.cropr"
    make().export(path)
    return path


def run_onnx(path):
    """Images -> logits of an ONNX file."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    return lambda pixels: session.run(["logits"], {"images": pixels})[0]


@pytest.mark.parametrize("fields", [{}, RANDOM, EVA02 | BFLOAT16])
def test_jax_gives_the_logits(tmp_path, fields):
    predictor = make(json.dumps(fields))
    predictor.export(tmp_path / "model")
    loaded = load_exported(tmp_path / "model")
    for count in (1, 7):
        np.testing.assert_allclose(loaded(images(count)), predictor(images(count)), atol=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def check_onnx(path, fields):
    """Equal for whole batches and for their images one by one, as one compiled batch tells."""
    predictor = make(json.dumps(fields))
    predictor.export(path, format="onnx")
    onnx.checker.check_model(path, full_check=True)
    session, pixels = run_onnx(path), images(7)
    expected = predictor(pixels)
    np.testing.assert_allclose(session(pixels), expected, atol=1e-4)
    one_by_one = [session(pixels[i : i + 1]) for i in range(7)]
    np.testing.assert_allclose(np.concatenate(one_by_one), expected, atol=1e-4)


@pytest.mark.parametrize("fields", [{}, EVA02])
def test_onnx_gives_the_logits(tmp_path, fields):
    check_onnx(tmp_path / "model.onnx", fields)


@pytest.mark.parametrize("name", sorted(REDUCERS.keys() - {"random"}))
def test_onnx_of_every_method(tmp_path, name):
    """At two sites, the second of which finds what the first has left; with flat patches, which tie
    where variances or distances decide."""
    reduction = {"name": name, "rate": 5, "fusion": "none"}
    check_onnx(tmp_path / "model.onnx", {"width": 16, "pool": "cls", "reduction": reduction})


@pytest.mark.parametrize("preprocess", [True, False])
def test_takes_normalized_floats(tmp_path, preprocess):
    predictor = make(preprocess=preprocess)
    predictor.export(tmp_path / "a", input="float32")
    predictor.export(tmp_path / "b", input=None if not preprocess else "float32", format="onnx")
    pixels = np.random.default_rng(0).standard_normal((3, 16, 24, 3), np.float32)
    for call in (load_exported(tmp_path / "a"), run_onnx(tmp_path / "b")):
        np.testing.assert_allclose(call(pixels), predictor(pixels), atol=1e-4)


def test_recipe_of_the_docs_needs_jax_alone(tmp_path, exported):
    recipe = re.search(r"\n(    import json\n.*?)\n\n\S", export.__doc__, re.DOTALL).group(1)
    blocked = "cropr_jax flax einops jaxtyping optax orbax onnx"
    program = f"import sys\nfor name in {blocked.split()}:\n    sys.modules[name] = None\n"
    program += "import numpy as np\nimages = np.load('images.npy')\n"
    program += re.sub("^    ", "", recipe, flags=re.MULTILINE)
    program += "\nnp.save('logits.npy', logits)\nassert metadata['input']['dtype'] == 'uint8'"
    np.save(tmp_path / "images.npy", images(5))
    (tmp_path / "digits.cropr").write_bytes(exported.read_bytes())
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), make()(images(5)), atol=1e-4)


def test_describes_itself(tmp_path, exported):
    found = load_exported(exported).metadata
    assert found["input"]["shape"] == ["batch", 16, 24, 3]
    assert found["output"]["shape"] == ["batch", 7]
    assert found["preprocess"] == json.loads(json.dumps(PREPROCESS))
    assert found["class_names"] == [f"class {i}" for i in range(7)]
    assert found["versions"]["jax"] == jax.__version__
    assert found["platforms"] == ["cpu", "cuda", "tpu"]
    # 24 patches and CLS; 5 + 1 go after block 1, the last block sees all again.
    assert found["tokens"] == [19, 19, 25]

    make().export(tmp_path / "model.onnx", format="onnx")
    props = {p.key: json.loads(p.value) for p in onnx.load(tmp_path / "model.onnx").metadata_props}
    own = ("made", "params", "platforms", "calling_convention")
    assert {k: v for k, v in props.items() if k != "made"} == {
        k: v for k, v in found.items() if k not in own
    }


@pytest.mark.parametrize(
    ("fields", "removed"),
    [
        ({"depth": 4, "reduction": {"name": "cropr", "rate": 4, "fusion": "none"}}, [5, 9, 13, 13]),
        ({"reduction": {"name": "none"}}, [0, 0, 0]),
    ],
)
def test_counts_tokens_after_each_block(fields, removed):
    model = models.create(CONFIG | fields)
    assert tokens_after(model) == [25 - count for count in removed]


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({}, {"format": "tf"}, "format: found 'tf', expected 'jax' or 'onnx'"),
        ({}, {"input": "int32"}, "input: found 'int32', expected 'uint8' or 'float32'"),
        (RANDOM, {"format": "onnx"}, "'random_seed', for which there is no rule"),
        (BFLOAT16, {"format": "onnx"}, "computes in bfloat16, expected float32"),
    ],
)
def test_refuses_what_cannot_be(tmp_path, fields, options, message):
    with pytest.raises(ConfigError, match=message):
        make(json.dumps(fields)).export(tmp_path / "model", **options)
    assert not list(tmp_path.iterdir())


def test_refuses_places_and_missing_settings(tmp_path, exported):
    with pytest.raises(ConfigError, match="exists; remove it"):
        make().export(exported)
    with pytest.raises(ConfigError, match="there is no folder"):
        make().export(tmp_path / "a" / "b")
    with pytest.raises(ConfigError, match="need preprocess settings"):
        make(preprocess=False).export(tmp_path / "a", input="uint8")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("format", "package"), [("jax", "flatbuffers"), ("onnx", "onnx")])
def test_names_the_missing_package(tmp_path, monkeypatch, format, package):
    loaded = [
        name
        for name in sys.modules
        if name.startswith(("jax._src.export.serialization", "cropr_jax.models.to_onnx"))
    ]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        make().export(tmp_path / "model", format=format)


def test_loaded_predictor_refuses_wrong_images(exported):
    loaded = load_exported(exported)
    for wrong in (images(1)[:, :8], images(1).astype(np.float32)):
        with pytest.raises(ValueError, match=r"expected uint8 \['batch', 16, 24, 3\]: RGB"):
            loaded(wrong)


def rewrite(source, target, **changes):
    """The artefact with other entries, or other metadata, and right sums."""
    with np.load(source) as file:
        arrays = dict(file)
    metadata = json.loads(arrays["metadata"].tobytes())
    for name, value in changes.items():
        if name in arrays:
            arrays[name] = value
        else:
            metadata[name] = value
    arrays["metadata"] = np.frombuffer(json.dumps(metadata).encode(), np.uint8)
    with target.open("wb") as file:
        np.savez(file, **arrays)


def test_explains_other_versions(tmp_path, exported):
    high = jax.export.maximum_supported_calling_convention_version
    program = np.load(exported)["program"]
    for changes, message in (
        ({"layout": 2}, "has layout 2, which cropr_jax .* does not know yet"),
        ({"calling_convention": 1}, r"is too old: it was made by .* with jax .* \(calling .* 1, "),
        ({"calling_convention": high + 1}, "is too new: it was made by .* from the checkpoint"),
        ({"program": program[: len(program) // 2]}, "cannot be read by jax .*; export it again"),
        ({"program": np.zeros(99, np.uint8)}, "cannot be read by jax .*; export it again"),
        ({"params": ["head/bias"]}, "cannot be read by jax"),
    ):
        rewrite(exported, tmp_path / "changed", **changes)
        with pytest.raises(ConfigError, match=message):
            load_exported(tmp_path / "changed")


def test_explains_other_files(tmp_path, exported):
    with pytest.raises(ConfigError, match="does not exist"):
        load_exported(tmp_path / "none")
    whole = exported.read_bytes()
    contents = {
        "empty": b"",
        "text": b"hello",
        "array": None,
        "weights": None,
        **{f"cut {size}": whole[:size] for size in np.linspace(1, len(whole) - 1, 9, dtype=int)},
    }
    for name, content in contents.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        else:
            with path.open("wb") as file:
                np.save(file, images(1)) if name == "array" else np.savez(file, a=images(1))
        with pytest.raises(ConfigError, match="is damaged, or not what Predictor.export"):
            load_exported(path)


def test_notices_flipped_bytes(tmp_path, exported):
    """Anywhere in the program or the weights; elsewhere it may read them all the same."""
    whole = bytearray(exported.read_bytes())
    refused, path = 0, tmp_path / "flipped"
    expected = np.asarray(make()(images(1)))
    for place in np.random.default_rng(0).integers(0, len(whole), 40):
        flipped = whole.copy()
        flipped[place] ^= 0xFF
        path.write_bytes(flipped)
        try:
            loaded = load_exported(path)
        except ConfigError:
            refused += 1
        else:
            np.testing.assert_allclose(loaded(images(1)), expected, atol=1e-4)
    assert refused > 30


def write_run(workdir, fields):
    """A work directory with one checkpoint; returns its predictor."""
    predictor = make(json.dumps(fields))
    model = models.create(CONFIG | fields)
    state = TrainState(jnp.int32(5), random_params(model), {}, None)
    with Checkpoints(workdir, "top1") as writer:
        writer.save(5, state)
    config = {"task": "classification", "model": CONFIG | fields, "preprocess": PREPROCESS}
    (workdir / "config.json").write_text(json.dumps(config))
    (workdir / "run.json").write_text(json.dumps({"class_names": list("abcdefg")}))
    return predictor


def test_command(tmp_path, capsys):
    workdir = tmp_path / "run"
    workdir.mkdir()
    predictor = write_run(workdir, BFLOAT16)
    float32 = make(json.dumps({"depth": 2}))
    for format, path in (("jax", tmp_path / "a.cropr"), ("onnx", tmp_path / "a.onnx")):
        export.main(["--workdir", str(workdir), str(path), "--format", format])
        assert str(path) in capsys.readouterr().out
    loaded = load_exported(tmp_path / "a.cropr")
    assert loaded.metadata["class_names"] == list("abcdefg")
    np.testing.assert_allclose(loaded(images(2)), predictor(images(2)), atol=1e-4)
    session = run_onnx(tmp_path / "a.onnx")
    np.testing.assert_allclose(session(images(2)), float32(images(2)), atol=1e-4)
    with pytest.raises(ConfigError, match="exists; remove it"):
        export.main(["--workdir", "nowhere", str(tmp_path / "a.onnx")])


def assert_tie(forward, params, image, logits):
    """The model itself gives these logits with parameters that differ by parts in a million.

    So it is where two patches' scores are the same but for rounding: either may be pruned.
    """
    x = image[None].astype(np.float32) / 127.5 - 1
    draw = np.random.default_rng(0)

    def nudge(leaf):
        return leaf * (1 + 1e-6 * draw.standard_normal(leaf.shape, np.float32))

    found = [forward(jax.tree.map(nudge, params), x)[0] for _ in range(20)]
    assert min(float(np.abs(other - logits).max()) for other in found) < 1e-4


@pytest.mark.slow
@pytest.mark.real_data
def test_pretrained_vit_predicts_the_same_class(tmp_path):
    """Of 300 ImageNet images, at batch 1 and 7, with 8 patches pruned after each block."""
    folder = DATA / "imagenet_val227"
    entries = json.loads((folder / "labels.json").read_text())["images"]
    pixels = np.stack(
        [np.asarray(Image.open(folder / "images" / e["file_name"])) for e in entries]
    )[:, 1:225, 1:225]
    model = models.create(
        {
            "variant": "ti",
            "image_size": 224,
            "num_classes": 1000,
            "pool": "cls",
            "reduction": {"name": "attn_topk", "rate": 8, "fusion": "none"},
        }
    )
    half = {"res": (224, 224), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    with np.load(DATA / "weights" / "vit_tiny_patch16_224.npz") as weights:
        params = params_from_state_dict(dict(weights), model)
    predictor = Predictor.from_model(model, params, PREPROCESS | half)
    predictor.export(tmp_path / "model.cropr")
    predictor.export(tmp_path / "model.onnx", format="onnx")
    loaded, session = load_exported(tmp_path / "model.cropr"), run_onnx(tmp_path / "model.onnx")
    forward = jax.jit(lambda params, x: model.apply({"params": params}, x)[0])
    bounds = [*range(6), *range(6, len(pixels), 7)]
    right = 0
    for start, end in zip(bounds, [*bounds[1:], len(pixels)], strict=True):
        batch = pixels[start:end]
        expected = np.asarray(predictor(batch))
        for call in (loaded, session):
            logits = np.asarray(call(batch))
            np.testing.assert_array_equal(logits.argmax(1), expected.argmax(1))
            for i in np.flatnonzero(np.abs(logits - expected).max(1) > 1e-4):
                assert_tie(forward, params, batch[i], logits[i])
        labels = [entry["label"] for entry in entries[start:end]]
        right += (expected.argmax(1) == labels).sum()
    assert len(pixels) == 300 and right > 200
