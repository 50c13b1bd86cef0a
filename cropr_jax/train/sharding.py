"""The device mesh and what lies where on it.

Two axes, both with automatic partitioning (`AxisType.Auto`): the batch is cut over `data` and
`fsdp`, parameters and moments over `fsdp` alone. This is `jax.jit` with `NamedSharding`, which used
to be called pjit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib.version import __version__ as JAXLIB

from cropr_jax.errors import ConfigError

BATCH = P(("data", "fsdp"))


def split_cpu(devices: int | None) -> None:
    """Makes so many devices of the CPU; to be called before anything asks for devices.

    One program uses two cores badly: cut over two devices, a batch of a small model trains half
    again as fast. GPUs stay as they are, and so does a number that XLA_FLAGS sets.

    Args:
      devices: their number, None to leave it.

    Raises:
      ConfigError: if it is not positive.
    """
    if devices is None or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    if devices < 1:
        raise ConfigError(f"config.cpu_devices: found {devices}, expected 1 or more")
    jax.config.update("jax_num_cpu_devices", devices)


def check_compiler_options(options: Any) -> None:
    """Refuses options that the installed XLA does not know, which it would say only after tracing.

    Args:
      options: {name: value} of XLA's debug options, as `jax.jit` takes them.

    Raises:
      ConfigError: with XLA's own message.
    """
    if not isinstance(options, Mapping):
        raise ConfigError(f"config.compiler_options: found {options!r}, expected {{name: value}}")
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=dict(options))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"config.compiler_options: {dict(options)} is not for jaxlib {JAXLIB} "
            f"({str(error).splitlines()[0]}): correct or remove the option"
        ) from error


def make_mesh(data: int = -1, fsdp: int = 1) -> Mesh:
    """Mesh of all devices of all hosts, `data` x `fsdp`.

    Args:
      data: size of the data axis, -1 for all devices that `fsdp` leaves.
      fsdp: size of the axis over which parameters are cut, 1 for copies everywhere.

    Raises:
      ConfigError: if the two sizes do not multiply to the number of devices.
    """
    devices = jax.device_count()
    if fsdp < 1 or devices % fsdp:
        raise ConfigError(f"config.mesh.fsdp = {fsdp} does not divide the {devices} devices")
    size = devices // fsdp if data == -1 else data
    if size * fsdp != devices:
        raise ConfigError(
            f"config.mesh.data x mesh.fsdp = {size} x {fsdp}, but there are {devices} devices: set "
            "config.mesh.data=-1 to take what is left"
        )
    return jax.make_mesh((size, fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def parameter_spec(shape: tuple[int, ...], fsdp: int) -> P:
    """Cuts the largest axis that `fsdp` divides; vectors and scalars are copied.

    Of equally large axes the last one is cut. Moments have the shapes of their parameters, so the
    same rule gives them the same place.
    """
    if fsdp == 1 or len(shape) < 2:
        return P()
    candidates = [axis for axis, size in enumerate(shape) if size % fsdp == 0]
    if not candidates:
        return P()
    axis = max(candidates, key=lambda a: (shape[a], a))
    return P(*(("fsdp" if a == axis else None) for a in range(axis + 1)))


def state_shardings(abstract: Any, mesh: Mesh) -> Any:
    """Sharding of every array of a state, by `parameter_spec`.

    Args:
      abstract: tree of arrays or `ShapeDtypeStruct`s.
      mesh: from `make_mesh`.
    """
    fsdp = mesh.shape["fsdp"]
    return jax.tree.map(
        lambda leaf: NamedSharding(mesh, parameter_spec(leaf.shape, fsdp)), abstract
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Examples over all devices."""
    return NamedSharding(mesh, BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on each device."""
    return NamedSharding(mesh, P())


def place(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Puts this process's share of a global batch on its devices; does not wait.

    Args:
      batch: arrays whose first axis is this process's part of the global batch, in the order of
        processes.
      mesh: from `make_mesh`.
    """
    sharding = batch_sharding(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, array)
        for name, array in batch.items()
    }
