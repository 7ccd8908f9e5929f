"""What the machine itself can do: bytes a second of memory, operations a second of matrix products.

On a CPU numpy measures memory, with as many threads as the process may use: a limit should not depend on how
well one library's compiler uses the machine. Elsewhere jax does.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

_BYTES = 256 * 2**20  # more than any cache holds
_MATMUL_DIM = 2048


def machine_limits() -> dict[str, float]:
    """Returns the limits that a model meets, in 1e9 bytes or operations a second."""
    found = {"copy_gb_s": copy_bandwidth(), "read_gb_s": read_bandwidth()}
    found |= {f"matmul_{dtype}_gflop_s": matmul_rate(dtype) for dtype in ("float32", "bfloat16")}
    return {name: round(value / 1e9, 1) for name, value in found.items()}


def copy_bandwidth(repeats: int = 5) -> float:
    """Returns the bytes a second of a copy between two large arrays, those read and those written."""
    if jax.default_backend() == "cpu":
        source, target = np.ones(_BYTES // 4, np.float32), np.zeros(_BYTES // 4, np.float32)
        seconds = _on_threads(lambda part: np.copyto(target[part], source[part]), source.size, repeats)
    else:
        array = jnp.ones(_BYTES // 4, jnp.float32)
        negate = jax.jit(jnp.negative)
        seconds = _median_s(lambda: negate(array).block_until_ready(), repeats)
    return 2 * _BYTES / seconds


def read_bandwidth(repeats: int = 5) -> float:
    """Returns the bytes a second of reading a large array once, as a decode step reads the weights.

    On a CPU by numpy's product of a matrix and a vector, which reads several rows at once.
    """
    if jax.default_backend() == "cpu":
        matrix, vector = np.ones((_BYTES // 4 // 4096, 4096), np.float32), np.ones(4096, np.float32)
        seconds = _median_s(lambda: matrix @ vector, repeats)
    else:
        values = jnp.ones(_BYTES // 4, jnp.float32)
        largest = jax.jit(jnp.max)
        seconds = _median_s(lambda: largest(values).block_until_ready(), repeats)
    return _BYTES / seconds


def matmul_rate(dtype: str, repeats: int = 5) -> float:
    """Returns the multiplications and additions a second of a large square product, with float32 output."""
    left, right = (
        jax.random.normal(key, (_MATMUL_DIM, _MATMUL_DIM), dtype)
        for key in jax.random.split(jax.random.key(0))
    )
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    return 2 * _MATMUL_DIM**3 / _median_s(lambda: product(left, right).block_until_ready(), repeats)


def num_threads() -> int:
    """Returns how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _on_threads(work: Callable[[slice], object], size: int, repeats: int) -> float:
    """Returns the median seconds of `work` on equal parts of `size` elements, one a thread."""
    threads = num_threads()
    bounds = np.linspace(0, size, threads + 1).astype(int)
    parts = [slice(start, end) for start, end in itertools.pairwise(bounds)]
    with ThreadPoolExecutor(threads) as pool:
        return _median_s(lambda: list(pool.map(work, parts)), repeats)


def _median_s(call: Callable[[], object], repeats: int) -> float:
    call()  # allocates and compiles
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
