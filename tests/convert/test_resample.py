"""Position tables and patch kernels at other sizes, by both rules."""

import numpy as np
import pytest
from conftest import fixture_names, load_fixture

from cropr_jax.convert import resample
from cropr_jax.errors import ConfigError

POSITIONS = 1e-5
KERNELS = 2e-5


def cases():
    """(fixture, kind, number within the kind, description) of every case."""
    for name in fixture_names("resample"):
        counts = {}
        for case in load_fixture(name)[1]["config"]["cases"]:
            number = counts.setdefault(case["kind"], 0)
            counts[case["kind"]] += 1
            yield name, case["kind"], number, case


@pytest.mark.parity
@pytest.mark.parametrize(("name", "kind", "number", "case"), list(cases()))
def test_against_timm(name, kind, number, case):
    arrays, _ = load_fixture(name)
    before, after = (arrays[f"{side}/{kind}.{number}"] for side in ("in", "out"))
    rule = "timm" if case["antialias"] else "torch"
    if kind == "pos_embed":
        old, new = tuple(case["old"]), tuple(case["new"])
        found = resample.resample_positions(before, new, case["prefix_tokens"], old, rule)
        np.testing.assert_allclose(found, after, rtol=0, atol=POSITIONS)
    else:
        kernel = before.transpose(2, 3, 1, 0)
        found = resample.resample_kernel(kernel, (case["new"], case["new"]), rule)
        np.testing.assert_allclose(found.transpose(3, 2, 0, 1), after, rtol=0, atol=KERNELS)


def cubic(x, a):
    """The cubic kernel (Keys 1981)."""
    x = abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def bicubic_matrix(old, new, a=-0.75):
    """[new, old]: one axis of PyTorch's bicubic without antialias, border pixels repeated."""
    matrix = np.zeros((new, old))
    for i in range(new):
        position = (i + 0.5) * old / new - 0.5
        for j in range(int(np.floor(position)) - 1, int(np.floor(position)) + 3):
            matrix[i, min(max(j, 0), old - 1)] += cubic(position - j, a)
    return matrix


@pytest.mark.parametrize(("old", "new"), [((4, 4), (7, 5)), ((6, 5), (3, 4))])
def test_torch_rule_up_and_down(old, new):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(*old, 3, 2)).astype(np.float32)
    rows, columns = (bicubic_matrix(a, b) for a, b in zip(old, new, strict=True))
    expected = np.einsum("ih,jw,hwcd->ijcd", rows, columns, images)
    found = resample.resample_kernel(images, new, "torch")
    np.testing.assert_allclose(found, expected, atol=1e-5)
    table = images.reshape(1, -1, 6)
    found = resample.resample_positions(table, new, 0, old, "torch")
    np.testing.assert_allclose(found, expected.reshape(1, -1, 6), atol=1e-5)


def test_kernels_respond_to_resized_patches_as_before():
    """What the pseudo-inverse is for; the other rule changes the response to a constant patch."""
    kernel = np.random.default_rng(1).normal(size=(14, 14, 3, 5)).astype(np.float32)
    sums = kernel.sum((0, 1))
    found = resample.resample_kernel(kernel, (16, 16), "timm")
    np.testing.assert_allclose(found.sum((0, 1)), sums, atol=1e-4)
    plain = resample.resample_kernel(kernel, (16, 16), "torch")
    np.testing.assert_allclose(plain.sum((0, 1)), sums * (16 / 14) ** 2, atol=2)
    assert np.abs(plain - found).max() > 0.5


@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
def test_prefix_entries_are_kept(prefix):
    rng = np.random.default_rng(2)
    table = rng.normal(size=(1, prefix + 12, 4)).astype(np.float16)
    found = resample.resample_positions(table, (5, 2), prefix, (3, 4))
    assert found.shape == (1, prefix + 10, 4) and found.dtype == np.float32
    np.testing.assert_array_equal(found[:, :prefix], table[:, :prefix].astype(np.float32))


def test_grids_that_are_no_square():
    assert resample.square_grid(197, 1) == resample.square_grid(196, 0) == (14, 14)
    assert resample.square_grid(198, 2) == (14, 14) and resample.square_grid(257, 1) == (16, 16)
    for entries, prefix in ((197, 0), (196, 1), (256, 1), (1, 1), (0, 1)):
        with pytest.raises(ConfigError, match="no square grid"):
            resample.square_grid(entries, prefix)


def test_patches_larger_than_any_are_refused():
    """Before anything of their size is made."""
    kernel = np.broadcast_to(np.float32(0), (2**20, 1, 3, 4))
    with pytest.raises(ConfigError, match="patches of 1048576 x 1 pixels, expected at most 64"):
        resample.resample_kernel(kernel, (16, 16))


def test_unknown_rule():
    with pytest.raises(ConfigError, match="resampling: found 'lanczos', expected 'timm' or"):
        resample.check_rule("lanczos")
