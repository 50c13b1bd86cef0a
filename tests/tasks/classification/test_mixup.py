"""Mixing against timm's numbers, and what chance decides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import fixture_names, load_fixture

from cropr_jax.errors import ConfigError
from cropr_jax.tasks.classification import mixup
from cropr_jax.tasks.classification.mixup import Draw, MixupConfig

apply = jax.jit(mixup.apply, static_argnums=(3, 4))
draw = jax.jit(mixup.draw, static_argnums=(0, 2, 3))


def one_group(weight, box=(0, 0, 0, 0), cut=False):
    return Draw(np.array([weight], np.float32), np.array([cut]), np.array([box], np.int32))


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("mixup_cutmix"))
def test_timm(name):
    arrays, meta = load_fixture(name)
    config = meta["config"]
    images = arrays["in/x"].transpose(0, 2, 3, 1)
    cases = [(f"mixup.{{}}.{lam}", one_group(lam)) for lam in config["mixup_lams"]]
    for i, case in enumerate(config["cutmix"]):
        top, bottom, left, right = case["box_yl_yh_xl_xh"]
        box = (top, bottom, left, right)
        cases.append((f"cutmix.{{}}.{i}", one_group(case["lam_corrected"], box, True)))
    assert cases
    for pattern, drawn in cases:
        mixed, targets = apply(
            drawn,
            images,
            arrays["in/labels"],
            config["num_classes"],
            config["label_smoothing"],
        )
        expected = arrays["out/" + pattern.format("x")].transpose(0, 2, 3, 1)
        np.testing.assert_allclose(mixed, expected, atol=1e-6)
        np.testing.assert_allclose(targets, arrays["out/" + pattern.format("y")], atol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("name", fixture_names("mixup_cutmix"))
def test_box_of_timm(name):
    """Some centre gives the stored box; its coefficient is then the stored one."""
    arrays, meta = load_fixture(name)
    size = arrays["in/x"].shape[2:]
    rows, columns = np.meshgrid(np.arange(size[0]), np.arange(size[1]), indexing="ij")
    every = jax.jit(jax.vmap(lambda lam, r, c: mixup.cut_box(lam, r, c, size), (None, 0, 0)))
    for case in meta["config"]["cutmix"]:
        boxes, weights = every(np.float32(case["lam_drawn"]), rows.ravel(), columns.ravel())
        same = (np.asarray(boxes) == case["box_yl_yh_xl_xh"]).all(axis=1)
        assert same.any()
        np.testing.assert_allclose(np.asarray(weights)[same], case["lam_corrected"], atol=1e-6)


def test_groups_are_mirrored_each_by_itself():
    images = np.tile(np.arange(8, dtype=np.float32).reshape(8, 1, 1, 1), (1, 2, 2, 3))
    partners = jax.jit(mixup.partners, static_argnames="groups")
    other, labels = jax.device_get(partners(images, np.arange(8), groups=2))
    assert labels.tolist() == [3, 2, 1, 0, 7, 6, 5, 4]
    assert other[:, 0, 0, 0].tolist() == labels.tolist()


def test_draws_depend_on_the_group_alone():
    config = MixupConfig()
    key = jax.random.key(3)
    two, four = jax.device_get([draw(config, key, groups, (16, 16)) for groups in (2, 4)])
    for short, long in zip(two, four, strict=True):
        np.testing.assert_array_equal(short, long[:2])


def test_statistics_of_draws():
    drawn = draw(MixupConfig(), jax.random.key(0), 4000, (32, 32))
    cut = np.asarray(drawn.cut)
    assert abs(cut.mean() - 0.5) < 0.04
    plain = np.asarray(drawn.weight)[~cut]
    # Beta(0.8, 0.8): mean 1/2, variance 1 / (4 (2 * 0.8 + 1)).
    assert abs(plain.mean() - 0.5) < 0.03
    assert abs(plain.var() - 1 / 10.4) < 0.01


@pytest.mark.parametrize(
    ("config", "cut"),
    [
        (MixupConfig(mixup=0.0), True),
        (MixupConfig(cutmix=0.0), False),
    ],
)
def test_one_kind_alone(config, cut):
    drawn = draw(config, jax.random.key(0), 50, (8, 8))
    assert (np.asarray(drawn.cut) == cut).all()


def test_off_leaves_images_and_smooths():
    images, labels = jnp.ones((3, 4, 4, 3)), jnp.array([0, 1, 2])
    config = MixupConfig(mixup=0.0, cutmix=0.0, label_smoothing=0.3)
    mixed, targets = mixup.mix(config, jax.random.key(0), images, labels, 3)
    assert mixed is images
    np.testing.assert_allclose(targets, np.eye(3) * 0.7 + 0.1, atol=1e-7)


@pytest.mark.parametrize(("group", "batch"), [(6, 8), (3, 6), (512, 7)])
def test_groups_that_do_not_fit(group, batch):
    with pytest.raises(ConfigError, match="config.mixup.group"):
        MixupConfig(group=group).groups(batch)


def test_small_batch_is_one_group():
    assert MixupConfig(group=512).groups(64) == 1
    assert MixupConfig(group=512).groups(1024) == 2
