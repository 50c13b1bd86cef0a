"""What the device can do at most: large matrix products and a large copy."""

import math
import time
from typing import Any

import jax
import jax.numpy as jnp

# Sizes that fill the device: rows of the square matrices, bytes copied.
SIZE = (8192, 2**30)
CPU_SIZE = (2048, 2**27)
REPEATS = 5
SECONDS = 0.3


def best_seconds(function: Any, *args: jax.Array) -> float:
    """Shortest mean time of a call over some repeats."""
    compiled = jax.jit(function).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    calls = math.ceil(SECONDS / (time.perf_counter() - start))
    means = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(calls):
            output = compiled(*args)
        jax.block_until_ready(output)
        means.append((time.perf_counter() - start) / calls)
    return min(means)


def measure() -> dict[str, float]:
    """Floor of this device.

    Returns:
      `float32_macs_per_second` and `bfloat16_macs_per_second` of a square matrix product, at JAX's
      default precision (on recent NVIDIA cards that is TF32 for float32); `bytes_per_second` of a
      copy, read and written bytes both counted.
    """
    rows, size = CPU_SIZE if jax.default_backend() == "cpu" else SIZE
    found = {}
    for dtype in ("float32", "bfloat16"):
        square = jnp.ones((rows, rows), dtype)
        seconds = best_seconds(jnp.matmul, square, square)
        found[f"{dtype}_macs_per_second"] = rows**3 / seconds
    words = jnp.ones(size // 4, jnp.float32)
    found["bytes_per_second"] = 2 * size / best_seconds(lambda x: x + 1, words)
    return found


def share(row: dict[str, Any], floor: dict[str, float]) -> float:
    """Part of the matrix product's speed that a row of the benchmark reaches."""
    macs = row["macs_all"] * row["images_per_second"]
    return macs / floor[f"{row['precision']}_macs_per_second"]
