"""What a load costs in memory, in a process of its own."""

import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import environment
from weight_files import dense, pth_bytes

from cropr_jax import models
from cropr_jax.convert.files import write_safetensors
from cropr_jax.convert.to_timm import rename
from cropr_jax.core.trees import flatten

# Times the float32 bytes of the parameters, above what the process held before.
BOUND = 2.2
# EVA-02 as it is, but smaller; the file is larger than what `load.RELEASE` keeps of it in memory.
FIELDS = {"name": "eva02", "width": 512, "depth": 12, "heads": 8, "patch": 14, "image_size": 112}
FIELDS |= {"num_classes": 1000, "pool": "mean_patches"}
PRUNED = FIELDS | {"reduction": {"name": "cropr", "rate": 5, "fusion": "llf"}}
TINY = {"width": 16, "depth": 3, "heads": 1, "num_classes": 7}

# Loads a small file, so that all is imported and all machinery up, then a large one. Numbers are
# the system's: Python's and NumPy's own do not see mapped files.
PROGRAM = """
import json, sys
from pathlib import Path
import jax
from cropr_jax import models
from cropr_jax.convert.load import load
from cropr_jax.train.initial import initial_params

def held(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))

def read(path, fields):
    model = models.create(json.loads(fields))
    if how == "load":
        return load(path, model).params
    params, _ = initial_params(path, model, jax.random.key(0))
    return jax.block_until_ready(params)

how, *rest = sys.argv[1:]
warm = read(*rest[:2])
before = held("VmRSS")
params = read(*rest[2:])
print(json.dumps([held("VmHWM") - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params))]))
"""


def write(path, fields):
    """A file of random weights under timm's names, of the format that its name says."""
    random = np.random.default_rng(0)
    shapes = flatten(models.abstract_params(models.create(fields)))
    state = rename({k: random.random(leaf.shape, np.float32) for k, leaf in shapes.items()})
    if path.suffix == ".npz":
        np.savez(path, **state)
    elif path.suffix == ".pth":
        path.write_bytes(pth_bytes(*dense(state)))
    else:
        write_safetensors(path, state)


def measure(folder, suffix, how, wanted, fields=FIELDS):
    """(bytes at the peak above those before, bytes of the parameters) of one load."""
    small, large = folder / f"small{suffix}", folder / f"large{suffix}"
    write(small, fields | TINY)
    write(large, fields)
    words = [how, str(small), json.dumps(wanted | TINY), str(large), json.dumps(wanted)]
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words],
            env=environment(),
            check=True,
            stdout=subprocess.PIPE,
        )
    finally:
        large.unlink()
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "how", "wanted"),
    [
        (".npz", "load", FIELDS),
        (".pth", "load", FIELDS),
        (".safetensors", "load", FIELDS),
        (".pth", "initial_params", PRUNED),
    ],
)
def test_peak(tmp_path, suffix, how, wanted):
    peak, size = measure(tmp_path, suffix, how, wanted)
    assert size > 100 << 20
    assert 1 < peak / size < BOUND
