"""Sliding layers that drop rows: bytes, tokens and time at 16k positions, on against off; JSON out.

python -m benchmarks.kv_eviction
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jaxinfer as ji
from benchmarks.chat_reuse import parser, run
from jaxinfer.generation import kv_dtype
from jaxinfer.generation.decode import MAX_STEPS, DecodeRun, decode_steps, first_token
from jaxinfer.generation.prefill import prefill

MODEL, CAPACITY, STEPS = "gemma3-270m", 16_384, 16
_SHARE = 0.4  # of the bytes without eviction


@dataclasses.dataclass
class Side:
    """One policy's run as it goes on; `tokens` are what it has sampled."""

    policy: ji.KvWindowPolicy
    run: DecodeRun
    allocated_bytes: int
    tokens: list[int]
    seconds: list[float]


def begin(model: ji.Model, policy: ji.KvWindowPolicy, prompt: Sequence[int]) -> Side:
    """Returns a side that has read the prompt."""
    config = model.config
    state = ji.init_state(config, capacity=CAPACITY, dtype=kv_dtype(config), kv_window=policy)
    allocated = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    logits, state = prefill(model.params, [prompt], state, config=config, donate=True)
    most = np.full(1, np.iinfo(np.int32).max, np.int32)
    run, _ = first_token(logits, state, most, np.array([-1], np.int32), None, None, num_top=0)
    return Side(policy, run, allocated, [int(run.token[0])], [])


def advance(model: ji.Model, side: Side) -> None:
    """Decodes `STEPS` tokens and keeps them and their time."""
    began = time.perf_counter()
    side.run, block = decode_steps(model.params, side.run, np.int32(STEPS), config=model.config, num_top=0)
    jax.block_until_ready((side.run, block))
    side.seconds.append(time.perf_counter() - began)
    side.tokens += np.asarray(block.tokens)[0, :STEPS].tolist()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns all claims. The steps that are timed end at the capacity, on and off in turn."""
    model = ji.load(MODEL, dtype=args.dtype, kv_window=ji.KvWindowPolicy.off())
    config = model.config
    draw = random.Random(0)
    length = CAPACITY - STEPS * (args.repeats + 1)
    prompt = [draw.randrange(1000, config.vocab_size) for _ in range(length)]
    on, off = (begin(model, policy, prompt) for policy in (ji.KvWindowPolicy.on(), ji.KvWindowPolicy.off()))
    for index in range(args.repeats + 1):
        for side in (on, off) if index % 2 == 0 else (off, on):
            advance(model, side)
    formula = {
        side.policy: ji.KvResidency.from_config(config, side.policy, dtype=kv_dtype(config)).allocated_bytes(
            CAPACITY
        )
        for side in (on, off)
    }
    pairs = list(zip(on.seconds[1:], off.seconds[1:], strict=True))  # the first ones compile
    ratio = statistics.median(mine / theirs for mine, theirs in pairs)
    steps_ms = [1e3 * statistics.median(times) / STEPS for times in zip(*pairs, strict=True)]
    as_formula = all(side.allocated_bytes == formula[side.policy] for side in (on, off))
    share = on.allocated_bytes / off.allocated_bytes
    what = f"{MODEL}, capacity {CAPACITY:,}"
    return [
        {
            "what": f"{what}: allocated bytes equal the formula",
            "value": as_formula,
            "unit": "",
            "bound": ("equals", 1),
            "bytes": {"on": on.allocated_bytes, "off": off.allocated_bytes},
        },
        {"what": f"{what}: bytes on against off", "value": share, "unit": "x", "bound": ("below", _SHARE)},
        {
            "what": f"{what}: {len(on.tokens)} greedy tokens equal",
            "value": on.tokens == off.tokens,
            "unit": "",
            "bound": ("equals", 1),
        },
        {
            "what": f"{what}: a decode step on against off",
            "value": ratio,
            "unit": "x",
            "bound": ("reported", 0),
            "median_step_ms": dict(zip(("on", "off"), steps_ms, strict=True)),
        },
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = parser("python -m benchmarks.kv_eviction", __doc__).parse_args(argv)
    if not 1 <= STEPS <= MAX_STEPS or args.repeats < 1:
        raise SystemExit(f"--repeats must be at least 1; got {args.repeats}")
    return run("kv_eviction", MODEL, args, lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
