"""Accuracy without training: reading weights, the whole command."""

import json

import jax
import numpy as np
import pytest
from PIL import Image

from cropr_jax import models
from cropr_jax.bench import off_the_shelf, untrained
from cropr_jax.convert.timm import params_from_state_dict
from cropr_jax.errors import ConfigError
from cropr_jax.models import costs

CLASSES = 12
WIDTH, DEPTH, PATCH, SIDE = 16, 4, 4, 16


def state_dict(rng):
    """Random weights of a tiny ViT under timm's names."""

    def draw(*shape):
        return rng.normal(scale=0.8, size=shape).astype(np.float32)

    weights = {
        "cls_token": draw(1, 1, WIDTH),
        "pos_embed": draw(1, 1 + (SIDE // PATCH) ** 2, WIDTH),
        "patch_embed.proj.weight": draw(WIDTH, 3, PATCH, PATCH),
        "patch_embed.proj.bias": draw(WIDTH),
        "norm.weight": draw(WIDTH),
        "norm.bias": draw(WIDTH),
        "head.weight": draw(CLASSES, WIDTH),
        "head.bias": draw(CLASSES),
    }
    for i in range(DEPTH):
        for name, shape in {
            "norm1": (WIDTH,),
            "attn.qkv": (3 * WIDTH, WIDTH),
            "attn.proj": (WIDTH, WIDTH),
            "norm2": (WIDTH,),
            "mlp.fc1": (2 * WIDTH, WIDTH),
            "mlp.fc2": (WIDTH, 2 * WIDTH),
        }.items():
            weights[f"blocks.{i}.{name}.weight"] = draw(*shape)
            weights[f"blocks.{i}.{name}.bias"] = draw(shape[0])
    return weights


@pytest.fixture
def place(tmp_path):
    """Folder with weights, seven images of their size and three larger ones."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "tiny.npz", **state_dict(rng))
    for name, sides in (("exact", [(SIDE, SIDE)] * 7), ("large", [(20, 30), (31, 19), (18, 18)])):
        (tmp_path / name / "images").mkdir(parents=True)
        labels = {}
        for i, side in enumerate(sides):
            pixels = rng.integers(0, 256, (*side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / "images" / f"{i}.png")
            labels[f"{i}.png"] = i % CLASSES
        (tmp_path / name / "labels.json").write_text(json.dumps(labels))
    return tmp_path


def arguments(place, *more):
    return [
        "--weights",
        str(place / "tiny.npz"),
        "--data",
        f"{place / 'exact'}:none",
        "--data",
        str(place / "large"),
        "--heads",
        "2",
        "--rates",
        "4",
        "--batch_size",
        "4",
        *more,
    ]


def test_folders_on_the_command_line():
    assert off_the_shelf.folder("a/b:none") == ("a/b", "none")
    assert off_the_shelf.folder("a:b:0.875") == ("a:b", 0.875)
    assert off_the_shelf.folder("a:b") == ("a:b", off_the_shelf.CROP_RATIO)
    assert off_the_shelf.folder("0.5") == ("0.5", off_the_shelf.CROP_RATIO)


def test_rates_on_the_command_line():
    assert off_the_shelf.rates("4,three_stage:29") == (("per_block", 4), ("three_stage", 29))


def test_sizes_are_read_from_the_weights(place):
    model = models.create(untrained.model_fields(place / "tiny.npz", 2, None))
    assert (model.width, model.depth, model.heads, model.mlp_ratio) == (WIDTH, DEPTH, 2, 2)
    assert (model.image_size, model.patch, model.pool) == ((SIDE, SIDE), (PATCH, PATCH), "cls")
    assert (model.num_classes, model.prefix, model.layer_scale) == (CLASSES, 1, None)


def test_another_image_size(place, capsys):
    alone = arguments(place, "--reductions", "", "--data", f"{place / 'exact'}:1")
    del alone[2:6]  # of --data what is only cropped
    off_the_shelf.main([*alone, "--res", "12x20", "--json", str(place / "out.json")])
    (row,) = json.loads((place / "out.json").read_text())["rows"]
    larger = models.create(untrained.model_fields(place / "tiny.npz", 2, (12, 20)))
    assert larger.grid == (3, 5) and row["macs_all"] == costs.count(larger).all
    assert len(row["ranks"][0]) == 7 and "Unpruned" in capsys.readouterr().out


@pytest.mark.slow
def test_the_whole_command_and_its_resumption(place, capsys, monkeypatch):
    path, document = place / "out.json", place / "out.md"
    command = arguments(
        place,
        *("--reductions", "random,attn_topk_inverse,tome"),
        *("--seeds", "2", "--json", str(path), "--markdown", str(document)),
    )
    off_the_shelf.main(command)
    content = json.loads(path.read_text())
    assert str(place) not in path.read_text()
    assert [folder["images"] for folder in content["data"]] == [7, 3]
    rows = {(r["reduction"], r["fusion"]): r for r in content["rows"]}
    assert len(rows) == len(content["rows"]) == 6
    assert "at most 3 of 7 patch tokens, not 4" in rows.pop(("tome", "none"))["unreachable"]
    base = rows["none", "none"]
    assert base["top1_difference"] == 0 and base["top1_interval"] == [0, 0]
    for (reduction, _), row in rows.items():
        assert len(row["ranks"]) == (2 if reduction == "random" else 1)
        assert all(len(ranks) == 10 for ranks in row["ranks"])
        assert row["top1"] == pytest.approx(np.mean([r.count("0") / 10 for r in row["ranks"]]))
        top5 = np.mean([[int(rank) < 5 for rank in ranks] for ranks in row["ranks"]])
        assert row["top5"] == pytest.approx(top5)
        low, high = row["top1_interval"]
        assert low <= row["top1_difference"] <= high
        assert row["top1_difference"] == pytest.approx(row["top1"] - base["top1"])
    # The images differ, and pruning matters: the rows are no copies of one another.
    assert len(set(base["ranks"][0])) > 2
    assert len({row["ranks"][0] for row in rows.values()}) > 2
    # Sites after blocks 1 and 2, with one patch more for CLS; without fusion after 3 as well.
    assert rows["random", "llf"]["removed"] == 9 and rows["random", "none"]["removed"] == 13

    # Image by image, by hand.
    model = models.create(untrained.model_fields(place / "tiny.npz", 2, None))
    params = params_from_state_dict(dict(np.load(place / "tiny.npz")), model)
    for i in range(7):
        pixels = np.asarray(Image.open(place / "exact" / "images" / f"{i}.png"))
        image = jax.numpy.asarray(pixels[None] / 127.5 - 1, np.float32)
        logits = np.asarray(model.apply({"params": params}, image)[0][0])
        rank = int((logits > logits[i % CLASSES]).sum())
        assert base["ranks"][0][i] == str(min(rank, 9))

    printed = capsys.readouterr().out
    assert "### per_block, R = 4" in printed and printed.count("| attn_topk_inverse |") == 2
    assert "| tome | none | unreachable |" in printed
    assert printed.strip() in document.read_text()

    # What was measured is not measured again, more seeds are; other images are refused.
    def fail(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(off_the_shelf, "ranks", fail)
    off_the_shelf.main(command)
    assert json.loads(path.read_text()) == content
    with pytest.raises(AssertionError, match="measured again"):
        off_the_shelf.main([*command, "--seeds", "3"])
    with pytest.raises(ConfigError, match="measured with other mean"):
        off_the_shelf.main([*command, "--mean", "0.4"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--weights", "none.npz"], "'none.npz' does not exist"),
        (["--heads", "0"], "heads cannot be told from a width of 16"),
        (["--reductions", "none"], "'none' is always measured"),
        (["--reductions", "cropr"], "reducer_0.* is missing"),
        (["--reductions", "cropper"], "found 'cropper'"),
        (["--rates", "9"], "rate 9"),
        (["--rates", "two_stage:1"], "found 'two_stage'"),
        (["--fusion", "merge"], "found 'merge'"),
        (["--seeds", "0"], "--seeds: found 0"),
        (["--data", "a:2"], "ratio 2.0 of 'a'"),
        (["--batch_size", "0"], "--batch_size: found 0"),
    ],
)
def test_wrong_commands(place, more, message):
    with pytest.raises(ConfigError, match=message):
        off_the_shelf.main(arguments(place, *more))


def test_labels_beyond_the_classes(place):
    (place / "large" / "labels.json").write_text('{"0.png": 12}')
    with pytest.raises(ConfigError, match="labels up to 12, the weights 12 classes"):
        off_the_shelf.main(arguments(place))


def test_weights_that_are_no_whole_vit(place):
    weights = state_dict(np.random.default_rng(0))
    for lost, message in (("pos_embed", "'pos_embed', which tells"), ("norm", "no whole ViT")):
        kept = {name: array for name, array in weights.items() if not name.startswith(lost)}
        np.savez(place / "part.npz", **kept)
        with pytest.raises(ConfigError, match=message):
            off_the_shelf.main(arguments(place, "--weights", str(place / "part.npz")))
