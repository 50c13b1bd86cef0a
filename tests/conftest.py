"""Set-up shared by all tests: eight CPU devices, reference numbers, checked shapes."""

import collections
import gc
import importlib
import json
import os
import tempfile
from pathlib import Path

from jaxlib.version import __version_info__ as JAXLIB

# Tests compile much and compute little: half of the time would go into optimizing, and up to
# half of the rest into XLA's newer way of making fused kernels, which jaxlib 0.10 can still leave
# out; nor is it worth cutting such small programs into parts. Later ones end the process at a flag
# that they do not know.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
DEVICES = "--xla_force_host_platform_device_count=8"
CHEAP = ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
if JAXLIB >= (0, 11):
    CHEAP = []
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *CHEAP, DEVICES])

# Tracing makes and drops many small objects beside the many that imports leave for good: looking
# through all of these as often as Python does by default would take a fifth of the time.
gc.set_threshold(50_000, 20, 100)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

# Runs that a test resumes or compares have the same step: each process keeps what it compiled, for
# itself alone, so that no other reads a file half written.
COMPILED = tempfile.TemporaryDirectory(prefix="compiled-")
jax.config.update("jax_compilation_cache_dir", COMPILED.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

# What our modules import of others that is large.
LARGE = (
    "beartype",
    "flax.linen",
    "grain",
    "matplotlib.figure",
    "optax",
    "orbax.checkpoint",
    "scipy.stats",
    "tensorboardX",
    "tensorflow_datasets",
)

REPOSITORY = Path(__file__).resolve().parent.parent
FIXTURES = Path(
    os.environ.get("CROPR_FIXTURES", REPOSITORY.parent / "shared" / "fixtures")
).resolve()
DATA = Path(os.environ.get("CROPR_DATA", REPOSITORY.parent / "shared" / "data")).resolve()


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


def environment(**variables: str) -> dict[str, str]:
    """What a program that a test starts finds: `variables`, and not the eight devices."""
    flags = os.environ["XLA_FLAGS"].replace(DEVICES, "").strip()
    return os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(REPOSITORY)} | variables


def random_params(model, seed: int = 0):
    """Parameters of a model with random values everywhere, without compiling an initializer."""
    from cropr_jax import models

    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jax.numpy.asarray(rng.normal(scale=0.2, size=leaf.shape).astype(leaf.dtype)),
        models.abstract_params(model),
    )


def missing() -> dict[str, tuple[str, Path, str]]:
    """By marker, what its tests would read and is not there: its name, folder and variable."""
    found = {}
    if not fixture_names(""):
        found["parity"] = ("reference numbers", FIXTURES, "CROPR_FIXTURES")
    if not DATA.is_dir():
        found["real_data"] = ("data sets", DATA, "CROPR_DATA")
    return found


def pytest_configure(config):
    config.add_cleanup(COMPILED.cleanup)


def pytest_sessionstart(session):
    """In CI everything that tests read must be there; and large packages are imported."""
    if os.environ.get("CI") == "true":
        for what, folder, _ in missing().values():
            raise pytest.UsageError(f"CI=true but no {what} in {folder}")
    if session.config.getoption("numprocesses", None):
        return  # the workers will run them
    # jaxtyping's hook has whatever our modules are the first to import compiled from its source.
    for name in LARGE:
        importlib.import_module(name)


def pytest_collection_modifyitems(config, items):
    """Tests without what they read are left out, and counted in one loud line for each kind."""
    lines = config.stash[LEFT_OUT] = []
    for marker, (what, folder, variable) in missing().items():
        without = [item for item in items if item.get_closest_marker(marker)]
        if without:
            lines.append(f"{len(without)} {marker} tests; no {what} in {folder} (set {variable})")
            config.hook.pytest_deselected(items=without)
            items[:] = [item for item in items if item not in set(without)]
    if hasattr(config, "workerinput"):
        longest_first(items)


def longest_first(items):
    """Files with slow tests before those of many before the rest: the last leave no worker idle."""
    count = collections.Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, -count[item.path]))


LEFT_OUT = pytest.StashKey[list[str]]()


def pytest_sessionfinish(session):
    """With pytest-xdist the workers collect, and the controller reports what they left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Every worker collects all tests, so that any of them tells the whole."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", [])


def pytest_terminal_summary(terminalreporter, config):
    for line in config.stash.get(LEFT_OUT, []):
        terminalreporter.write_line(f"LEFT OUT: {line}", red=True, bold=True)
