"""The gated delta rule: chunks against a scan, decode against memory, checkpoints; JSON out.

python -m benchmarks.gated_delta

What is compared runs in turn, round after round, so that a slow minute of the machine hits all of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.chat_reuse import claim, parser, run
from jaxinfer.config import GatedDeltaConfig
from jaxinfer.generation import kv_dtype
from jaxinfer.generation.prefill import prefill_chunks
from jaxinfer.measuring.limits import copy_bandwidth
from jaxinfer.state import init_state
from jaxinfer.testing import random_params, tiny_config
from pallas_kernels.gated_delta import gated_delta_chunk, gated_delta_step
from pallas_kernels.gated_delta.reference import scaled_queries, unit_rows

DIM, COLUMNS, PREFILL_HEADS = 128, 2048, 16
DECODE_LAYERS, DECODE_ROWS, DECODE_HEADS = 36, 4, 32  # Qwen3-Next's: 288 MiB of state
CHECKPOINTS = tuple(range(250, 2001, 250))  # none at the end of a chunk but the last
Columns = dict[str, jax.Array]
State = tuple[jax.Array, ...]


@jax.jit
def chunked(columns: Columns, state: jax.Array) -> Any:
    return gated_delta_chunk(**columns, initial_state=state)[:2]


@jax.jit
def chunked_with_checkpoints(columns: Columns, state: jax.Array) -> Any:
    return gated_delta_chunk(**columns, initial_state=state, checkpoint_columns=jnp.int32([CHECKPOINTS]))


@jax.jit
def scanned(columns: Columns, state: jax.Array) -> Any:
    def one(state, column):
        column = {name: x[:, None] for name, x in column.items()}
        output, state = gated_delta_step(**column, initial_state=state)
        return state, output[:, 0]

    by_column = {name: jnp.swapaxes(x, 0, 1) for name, x in columns.items()}
    state, output = lax.scan(one, state, by_column)
    return jnp.swapaxes(output, 0, 1), state


def decode(layers: Sequence[Columns], states: State) -> tuple[list[jax.Array], State]:
    """One token through the recurrence of every layer."""
    found = [gated_delta_step(**c, initial_state=s) for c, s in zip(layers, states, strict=True)]
    return [output for output, _ in found], tuple(state for _, state in found)


def only_reads(layers: Sequence[Columns], states: State) -> tuple[list[jax.Array], State]:
    """The part of `decode` that multiplies the states by a key and a query."""

    def reads(columns: Columns, state: jax.Array) -> jax.Array:
        groups = state.shape[1] // columns["key"].shape[2]
        rows = [unit_rows(columns["key"])[:, 0], scaled_queries(columns["query"])[:, 0]]
        rows = jnp.repeat(jnp.stack(rows, axis=2), groups, axis=1)
        return jnp.matmul(rows, state, precision=lax.Precision.HIGHEST)

    return [reads(c, s) for c, s in zip(layers, states, strict=True)], states


def only_updates(layers: Sequence[Columns], states: State) -> tuple[list[jax.Array], State]:
    """The part of `decode` that decays the states and adds a product of two vectors."""

    def update(columns: Columns, state: jax.Array) -> jax.Array:
        key = jnp.repeat(columns["key"][:, 0], state.shape[1] // columns["key"].shape[2], axis=1)
        decay = jnp.exp(columns["log_decay"][:, 0])[..., None, None]
        return decay * state + key[..., :, None] * columns["value"][:, 0][..., None, :]

    return [], tuple(update(c, s) for c, s in zip(layers, states, strict=True))


def inputs(rows: int, q_len: int, key_heads: int, value_heads: int) -> tuple[Columns, jax.Array]:
    rng = np.random.default_rng(0)
    gates = (rows, q_len, value_heads)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    columns = {
        "query": normal(rows, q_len, key_heads, DIM),
        "key": normal(rows, q_len, key_heads, DIM),
        "value": normal(*gates, DIM),
        "log_decay": jnp.asarray(np.log(rng.uniform(0.5, 1, gates)), jnp.float32),
        "beta": jnp.asarray(rng.uniform(0, 1, gates), jnp.float32),
    }
    return columns, normal(rows, value_heads, DIM, DIM)


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = jax.block_until_ready(call())
    return time.perf_counter() - began, found


def prefill_claims(repeats: int) -> list[dict[str, Any]]:
    columns, state = inputs(1, COLUMNS, PREFILL_HEADS, PREFILL_HEADS)
    forms = {"chunked": chunked, "scan": scanned, "checkpoints": chunked_with_checkpoints}
    results = {name: jax.block_until_ready(form(columns, state)) for name, form in forms.items()}
    for one, other in zip(results["chunked"], results["scan"], strict=True):
        if not float(jnp.max(jnp.abs(one - other))) <= 1e-4 * float(jnp.max(jnp.abs(other))):
            raise RuntimeError("the chunked form and the scan differ")
    rounds = [
        {name: seconds(lambda form=form: form(columns, state))[0] for name, form in forms.items()}
        for _ in range(repeats)
    ]
    what = f"{COLUMNS:,} columns of {PREFILL_HEADS} heads x {DIM} x {DIM}"
    moved = 2 * COLUMNS * state.nbytes / statistics.median(each["scan"] for each in rounds)
    return [
        claim(f"{what}: a scan of the step against chunks", rounds, "scan", "chunked", ("at least", 8)),
        reported(f"{what}: state that the scan reads and writes", moved / 1e9, " GB/s"),
        claim(
            f"{what}: with checkpoints at {len(CHECKPOINTS)} positions against none",
            rounds,
            "checkpoints",
            "chunked",
            ("reported", 0),
        ),
    ]


def model_claims(repeats: int) -> list[dict[str, Any]]:
    """Checkpoints in the prefill of a model: four layers of Qwen3.5-0.8B's shape, random weights."""
    heads = {"num_key_heads": PREFILL_HEADS, "num_value_heads": PREFILL_HEADS}
    config = tiny_config(
        "qwen3_5",
        dtype="bfloat16",
        embed_dim=1024,
        mlp_dim=3584,
        num_q_heads=8,
        head_dim=256,
        softmax_scale=1 / 16,
        max_positions=COLUMNS,
        vision=None,
        gated_delta=GatedDeltaConfig(**heads, key_head_dim=DIM, value_head_dim=DIM, conv_width=4),
    )
    params = random_params(config)
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, COLUMNS).tolist()

    def prefill(checkpoint_at: tuple[int, ...]) -> float:
        state = jax.block_until_ready(init_state(config, capacity=COLUMNS, dtype=kv_dtype(config)))
        options = {"config": config, "donate": True, "checkpoint_at": checkpoint_at}
        return seconds(lambda: list(prefill_chunks(params, [prompt], state, **options))[-1][0])[0]

    forms = {"checkpoints": CHECKPOINTS, "none": ()}
    rounds = [{name: prefill(at) for name, at in forms.items()} for _ in range(repeats + 1)]
    what = f"{COLUMNS:,} tokens through 3 recurrent layers and a full one: checkpoints at {len(CHECKPOINTS)}"
    return [claim(f"{what} positions against none", rounds[1:], "checkpoints", "none", ("at most", 1.1))]


def decode_claims(repeats: int) -> list[dict[str, Any]]:
    layers, states = [], ()
    for _ in range(DECODE_LAYERS):
        columns, state = inputs(DECODE_ROWS, 1, DECODE_HEADS // 2, DECODE_HEADS)
        layers.append(columns)
        states += (state,)
    state_bytes = sum(state.nbytes for state in states)
    forms = {
        name: jax.jit(form, donate_argnames="states")
        for name, form in (("step", decode), ("reads", only_reads), ("updates", only_updates))
    }
    rounds: list[dict[str, float]] = []
    for _ in range(repeats + 1):
        times = {"copy": 2 * state_bytes / copy_bandwidth(repeats=3)}
        for name, form in forms.items():
            times[name], (_, states) = seconds(lambda form=form: form(layers, states))  # noqa: B023
        rounds.append(times)
    rounds = rounds[1:]  # the first one compiles
    what = f"one token, {state_bytes / 2**20:.0f} MiB of state"
    middle = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    return [
        claim(f"{what}: bytes a second against a copy's", rounds, "copy", "step", ("at least", 0.8)),
        reported(f"{what}: read and written once", 2 * state_bytes / middle["step"] / 1e9, " GB/s"),
        reported("a copy, read and written", 2 * state_bytes / middle["copy"] / 1e9, " GB/s"),
        reported("the reads of the state alone, read", state_bytes / middle["reads"] / 1e9, " GB/s"),
        reported("the updates alone, read and written", 2 * state_bytes / middle["updates"] / 1e9, " GB/s"),
    ]


def reported(what: str, value: float, unit: str) -> dict[str, Any]:
    return {"what": what, "value": round(value, 2), "unit": unit, "bound": ("reported", 0)}


def main(argv: Sequence[str] | None = None) -> int:
    options: argparse.ArgumentParser = parser("python -m benchmarks.gated_delta", __doc__)
    args = options.parse_args(argv)
    args.dtype = "float32"  # of the recurrence, whatever the model's is
    return run(
        "gated_delta",
        "gated delta rule",
        args,
        lambda: [
            *prefill_claims(args.repeats),
            *model_claims(args.repeats),
            *decode_claims(args.repeats),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
