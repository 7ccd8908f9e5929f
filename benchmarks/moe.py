"""Time a token of routed experts against the number of experts, as JSON: `python benchmarks/moe.py`.

At a fixed number of chosen experts a token should cost the same however many there are to choose from. The
weights of all cases together take the same memory, in as many layers as that gives, and every call takes
the next layer and other experts, so that no case lives in a cache that a model would have long left.
"""

import argparse
import functools
import json
import os
import platform
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.ops import routed_mlp


@functools.partial(jax.jit, static_argnames="implementation")
def run(x, gate_up, down, expert_ids, weights, *, implementation):
    return routed_mlp(
        x, gate_up, down, expert_ids, weights, activation=jax.nn.silu, implementation=implementation
    )


def layer(seed: int, num_experts: int, args: argparse.Namespace) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(seed))
    gate_up = jax.random.normal(keys[0], (num_experts, 2, args.mlp_dim, args.embed_dim), args.dtype)
    down = jax.random.normal(keys[1], (num_experts, args.embed_dim, args.mlp_dim), args.dtype)
    return jax.block_until_ready((gate_up * args.embed_dim**-0.5, down * args.mlp_dim**-0.5))


def call_times(rows: int, num_experts: int, layers: list, args: argparse.Namespace) -> np.ndarray:
    """Seconds of each call after the first."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, args.embed_dim), np.float32))
    weights = jnp.full((rows, args.per_token), 1 / args.per_token, jnp.float32)
    times = []
    for index in range(args.repeats + 1):
        chosen = rng.permuted(np.tile(np.arange(num_experts), (rows, 1)), axis=1)[:, : args.per_token]
        expert_ids = jax.block_until_ready(jnp.asarray(chosen, jnp.int32))
        start = time.perf_counter()
        run(
            x, *layers[index % len(layers)], expert_ids, weights, implementation=args.implementation
        ).block_until_ready()
        times.append(time.perf_counter() - start)
    return np.array(times[1:])


def measure(args: argparse.Namespace) -> list[dict]:
    results = []
    for num_experts in args.experts:
        layers = [layer(seed, num_experts, args) for seed in range(max(args.experts) // num_experts)]
        for rows in args.rows:
            times = call_times(rows, num_experts, layers, args)
            results.append(
                {
                    "rows": rows,
                    "num_experts": num_experts,
                    "us_a_token_least": round(float(times.min()) / rows * 1e6, 2),
                    "us_a_token_median": round(float(np.median(times)) / rows * 1e6, 2),
                }
            )
    base = {r["rows"]: r for r in results if r["num_experts"] == args.experts[0]}
    for result in results:
        least = base[result["rows"]]["us_a_token_least"]
        result["growth"] = round(result["us_a_token_least"] / least, 2)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--embed-dim", type=int, default=2048)
    parser.add_argument("--mlp-dim", type=int, default=768)
    parser.add_argument("--per-token", type=int, default=4)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 512, 2048])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--implementation", default=None)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    root = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    settings = {
        name: getattr(args, name) for name in ("embed_dim", "mlp_dim", "per_token", "dtype", "implementation")
    }
    record = {
        "benchmark": "moe",
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "jax": jax.__version__,
        "commit": commit.stdout.strip() or None,
        **settings,
        "results": measure(args),
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
