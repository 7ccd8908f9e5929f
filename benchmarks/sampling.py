"""Time of one sampling step, as JSON: `python benchmarks/sampling.py [--vocab 49152 262144] [--batch 1 8]`.

Logits are random with a standard deviation of 3, about what a small language model gives; `flat` logits
(0.01) make top-p look past its sorted candidates. `sort` is the same filter by one stable sort, for scale.
"""

import argparse
import functools
import json
import platform
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sampling import Sampling, sample, stack_sampling

CASES = {
    "greedy": (3.0, Sampling()),
    "temperature": (3.0, Sampling(temperature=1.0, seed=0)),
    "min_p": (3.0, Sampling(temperature=1.0, min_p=0.05, seed=0)),
    "top_k=50": (3.0, Sampling(temperature=1.0, top_k=50, seed=0)),
    "top_k=50 top_p=0.95": (3.0, Sampling(temperature=1.0, top_k=50, top_p=0.95, seed=0)),
    "top_p=0.9, temperature 0.5": (3.0, Sampling(temperature=0.5, top_p=0.9, seed=0)),
    "top_k=1000": (3.0, Sampling(temperature=1.0, top_k=1000, seed=0)),
    "top_p=0.9, flat": (0.01, Sampling(temperature=1.0, top_p=0.9, seed=0)),
    "penalty, greedy": (3.0, Sampling(repetition_penalty=1.2)),
}


@jax.jit
def argmax(logits):
    return jnp.argmax(logits, axis=-1)


@jax.jit
def sort(logits):
    order = jnp.argsort(-logits, axis=-1, stable=True)
    return jnp.cumsum(jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, -1), -1)


@functools.partial(jax.jit, static_argnames="with_logprob")
def step(logits, rows, index, seen, *, with_logprob):
    result = sample(logits, rows, index=index, seen=seen)
    return result if with_logprob else result.token


def least_ms(call, repeats: int) -> float:
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return round(min(times) * 1e3, 3)


def measure(vocab_size: int, batch: int, repeats: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((batch, vocab_size), np.float32)
    index = jnp.zeros(batch, jnp.int32)
    seen = jnp.asarray(rng.random((batch, vocab_size)) < 0.01)
    spread = jnp.asarray(3 * normal)
    times = {
        "argmax": least_ms(lambda: argmax(spread), repeats),
        "sort": least_ms(lambda: sort(spread), min(repeats, 2)),
    }
    for name, (deviation, sampling) in CASES.items():
        logits, rows = jnp.asarray(deviation * normal), stack_sampling([sampling] * batch)
        marks = None if sampling.repetition_penalty is None else seen
        times[name] = least_ms(lambda a=(logits, rows, index, marks): step(*a, with_logprob=False), repeats)
    times["greedy with logprob"] = least_ms(
        lambda: step(spread, stack_sampling([Sampling()] * batch), index, None, with_logprob=True), repeats
    )
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 262144])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    root = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    record = {
        "benchmark": "sampling",
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "jax": jax.__version__,
        "commit": commit.stdout.strip() or None,
        "unit": "ms a step, the least of the repeats",
        "results": [
            {"vocab_size": v, "batch": b, **measure(v, b, args.repeats)}
            for v in args.vocab
            for b in args.batch
        ],
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
