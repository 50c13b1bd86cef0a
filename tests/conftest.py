"""Set-up shared by all tests: eight CPU devices, reference numbers, checked shapes."""

import json
import os
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

REPOSITORY = Path(__file__).resolve().parent.parent
FIXTURES = Path(
    os.environ.get("CROPR_FIXTURES", REPOSITORY.parent / "shared" / "fixtures")
).resolve()


def fixture_names(prefix: str) -> list[str]:
    """Names of the reference data sets that start with `prefix`."""
    return sorted(path.stem for path in FIXTURES.glob(f"{prefix}*.json"))


def load_fixture(name: str) -> tuple[dict[str, np.ndarray], dict]:
    """Arrays and description of one reference data set."""
    meta = json.loads((FIXTURES / f"{name}.json").read_text())
    path = FIXTURES / f"{name}.npz"
    if not path.exists():
        return {}, meta
    with np.load(path) as arrays:
        return dict(arrays), meta


def pytest_sessionstart(session):
    """In CI the reference numbers must be there."""
    if os.environ.get("CI") == "true" and not fixture_names(""):
        raise pytest.UsageError(f"CI=true but no reference numbers in {FIXTURES}")


def pytest_collection_modifyitems(config, items):
    """Without reference numbers the parity tests are left out, and counted in one loud line."""
    if fixture_names(""):
        return
    parity = [item for item in items if item.get_closest_marker("parity")]
    config.stash[LEFT_OUT] = len(parity)
    config.hook.pytest_deselected(items=parity)
    items[:] = [item for item in items if item not in set(parity)]


LEFT_OUT = pytest.StashKey[int]()


def pytest_terminal_summary(terminalreporter, config):
    count = config.stash.get(LEFT_OUT, 0)
    if count:
        terminalreporter.write_line(
            f"LEFT OUT: {count} parity tests; no reference numbers in {FIXTURES} "
            "(set CROPR_FIXTURES)",
            red=True,
            bold=True,
        )
