"""Time the chunked gated delta rule against a scan of its step, as JSON: `python benchmarks/gated_delta.py`.

Both forms take the same inputs in turn, round after round, so that a slow minute of the machine hits both.
The step form is what the same columns cost when they are decoded.
"""

import argparse
import json
import os
import platform
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.gated_delta import gated_delta_chunk, gated_delta_step


@jax.jit
def chunked(columns, state):
    return gated_delta_chunk(**columns, initial_state=state)[:2]


@jax.jit
def stepped(columns, state):
    def one(state, column):
        column = {name: x[:, None] for name, x in column.items()}
        output, state = gated_delta_step(**column, initial_state=state)
        return state, output[:, 0]

    by_column = {name: jnp.swapaxes(x, 0, 1) for name, x in columns.items()}
    state, output = lax.scan(one, state, by_column)
    return jnp.swapaxes(output, 0, 1), state


FORMS = {"chunked": chunked, "stepped": stepped}


def inputs(q_len: int, args: argparse.Namespace) -> tuple[dict[str, jax.Array], jax.Array]:
    rng = np.random.default_rng(0)
    gates = (args.batch, q_len, args.value_heads)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    columns = {
        "query": normal(args.batch, q_len, args.key_heads, args.key_dim),
        "key": normal(args.batch, q_len, args.key_heads, args.key_dim),
        "value": normal(*gates, args.value_dim),
        "log_decay": jnp.asarray(np.log(rng.uniform(0.5, 1, gates)), jnp.float32),
        "beta": jnp.asarray(rng.uniform(0, 1, gates), jnp.float32),
    }
    return columns, normal(args.batch, args.value_heads, args.key_dim, args.value_dim)


def measure(q_len: int, args: argparse.Namespace) -> dict:
    columns, state = inputs(q_len, args)
    results = {name: jax.block_until_ready(form(columns, state)) for name, form in FORMS.items()}
    apart = max(
        float(jnp.max(jnp.abs(one - other)) / jnp.max(jnp.abs(other)))
        for one, other in zip(*results.values(), strict=True)
    )
    times: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(args.rounds):
        for name, form in FORMS.items():
            start = time.perf_counter()
            jax.block_until_ready(form(columns, state))
            times[name].append(time.perf_counter() - start)
    median = {name: float(np.median(values)) for name, values in times.items()}
    return {
        "q_len": q_len,
        **{f"{name}_ms": round(1e3 * value, 2) for name, value in median.items()},
        **{f"{name}_least_ms": round(1e3 * min(values), 2) for name, values in times.items()},
        "speedup": round(median["stepped"] / median["chunked"], 2),
        "largest_relative_difference": apart,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=16)
    parser.add_argument("--key-dim", type=int, default=128)
    parser.add_argument("--value-dim", type=int, default=128)
    parser.add_argument("--columns", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    root = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    record = {
        "benchmark": "gated_delta",
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "jax": jax.__version__,
        "commit": commit.stdout.strip() or None,
        **{name: value for name, value in vars(args).items() if name != "columns"},
        "results": [measure(q_len, args) for q_len in args.columns],
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
