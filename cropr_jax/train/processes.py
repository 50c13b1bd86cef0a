"""A process of a run: its set-up, joining others, and leaving together when asked to stop."""

from __future__ import annotations

import gc
import os
import signal
import threading
from typing import Any

import jax
from absl import logging
from jax.experimental import multihost_utils

from cropr_jax.errors import ConfigError
from cropr_jax.train import sharding

# Where compiled programs are kept unless a command says otherwise.
PROGRAMS = "~/.cache/cropr_jax/xla"


def set_up(cache_dir: str, cpu_devices: int | None) -> None:
    """What must be set before the first array: devices, and where compiled programs are kept.

    Args:
      cache_dir: of compiled programs, '' for nowhere; JAX's own setting goes before it.
      cpu_devices: see `sharding.split_cpu`.

    Raises:
      ConfigError: on a wrong number of devices.
    """
    # Tracing makes and drops many small objects beside the many that imports leave for good:
    # looking through all of these as often as Python does by default makes a start 15 % longer.
    gc.set_threshold(50_000, 20, 100)
    sharding.split_cpu(cpu_devices)
    # Orbax reports each save in a dozen lines, JAX every backend that it did not find.
    logging.set_verbosity(logging.WARNING)
    if cache_dir and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(cache_dir))
        # Small programs too: of a model in hundreds of them, most compile in less than a second.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


class Interrupted(Exception):
    """The run was asked to stop, and its state is saved."""


class Preemption:
    """Notices SIGTERM and Ctrl-C, so that the loop can save and leave between two steps.

    Attributes:
      asked: name of the signal that came; empty for none (one process).
    """

    def __init__(self):
        self.asked = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Preemption:
        # With several processes JAX's own service takes SIGTERM, and they agree on a step. Only
        # the main thread may take signals.
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, frame: Any) -> None:
        name = signal.Signals(number).name
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = name
        # Not by print, which may be under way.
        again = "; Ctrl-C leaves at once" if number == signal.SIGINT else ""
        os.write(2, f"\n{name}: saves and leaves{again}\n".encode())

    def at(self, step: int) -> bool:
        """Whether to leave after `step`; the same answer in every process."""
        if jax.process_count() == 1:
            return bool(self.asked)
        return multihost_utils.reached_preemption_sync_point(step)

    def check(self) -> None:
        """Leaves what can be done again, such as an evaluation; never with several processes.

        Raises:
          Interrupted: if the run was asked to stop.
        """
        if self.asked:
            raise Interrupted

    def leave(self) -> None:
        """Passes Ctrl-C on, so that a script that starts several runs ends too.

        Raises:
          KeyboardInterrupt: if that was the signal.
        """
        if self.asked == signal.SIGINT.name:
            raise KeyboardInterrupt


def wait_for_all(what: str) -> None:
    """Returns once every process of the run is here; at once where there is one.

    Args:
      what: the processes did, the same words in each.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def initialize_processes() -> None:
    """Joins the processes of a run; to be called before anything asks for devices.

    On SLURM and other clusters that JAX knows nothing need be set. Elsewhere three environment
    variables tell each process its place: JAX_COORDINATOR_ADDRESS (host:port of the first),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID (from 0).

    Raises:
      ConfigError: if the processes cannot be joined.
    """
    count, index = _told("JAX_NUM_PROCESSES"), _told("JAX_PROCESS_ID")
    try:
        jax.distributed.initialize(num_processes=count, process_id=index)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"config.distributed: cannot join the processes ({str(error).splitlines()[0]}); set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or leave it off"
        ) from error


def _told(name: str) -> int | None:
    """A whole number of the environment, None if it is not set."""
    value = os.environ.get(name)
    if value is None:
        return None
    if not value.strip().isdecimal():
        raise ConfigError(f"{name}: found {value!r}, expected a whole number from 0")
    return int(value)
