"""Mesh, parameter rule, placing."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cropr_jax.errors import ConfigError
from cropr_jax.train import sharding


def test_mesh_takes_what_is_left():
    assert dict(sharding.make_mesh(-1, 2).shape) == {"data": 4, "fsdp": 2}
    with pytest.raises(ConfigError, match="fsdp = 3"):
        sharding.make_mesh(-1, 3)
    with pytest.raises(ConfigError, match="2 x 2, but there are 8"):
        sharding.make_mesh(2, 2)


@pytest.mark.parametrize(("flags", "asked", "found"), [
    ("", 3, 3), ("", None, 1), ("--xla_force_host_platform_device_count=2", 3, 2),
])  # fmt: skip
def test_splits_the_cpu_unless_told_otherwise(flags, asked, found):
    program = f"""
import jax
from cropr_jax.train import sharding
sharding.split_cpu({asked})
print(jax.device_count())
"""
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == found


def test_no_cpu_device_is_refused(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    with pytest.raises(ConfigError, match="cpu_devices: found 0"):
        sharding.split_cpu(0)


@pytest.mark.parametrize(("shape", "spec"), [
    ((4096,), P()), ((), P()), ((1024, 4096), P(None, "fsdp")), ((4096, 1024), P("fsdp")),
    ((1024, 16, 64), P("fsdp")), ((16, 64, 1024), P(None, None, "fsdp")), ((3, 5), P()),
    ((6, 8), P(None, "fsdp")), ((8, 8), P(None, "fsdp")), ((1, 197, 1024), P(None, None, "fsdp")),
])  # fmt: skip
def test_largest_divisible_axis(shape, spec):
    assert sharding.parameter_spec(shape, 4) == spec
    assert sharding.parameter_spec(shape, 1) == P()


def test_placing():
    mesh = sharding.make_mesh(-1, 2)
    image = np.arange(16.0).reshape(16, 1)
    placed = sharding.place({"image": image}, mesh)["image"]
    np.testing.assert_array_equal(placed, image)
    assert len({str(s.index) for s in placed.addressable_shards}) == jax.device_count()
