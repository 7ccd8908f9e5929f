"""Runs the Mosaic GPU kernels interpreted on a CPU, races detected; prints one JSON line a case.

    NPROC=16 python -m tests.pallas_kernels.span_attention.interpret_gpu small

The interpreter blocks a thread of XLA's pool for each warpgroup that waits at a barrier. With as few threads
as a small machine has cores it comes to a halt, so the pool's size, NPROC, is set before jax starts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.span_attention.cases import CASES, Case
from pallas_kernels.span_attention.gpu import BlockSizes, span_attention_gpu
from pallas_kernels.span_attention.gpu_decode import DecodeBlocks, decode_attention_gpu, paged_attention_gpu
from pallas_kernels.span_attention.gpu_tile import TileMath
from tests.pallas_kernels.span_attention import oracles

BY_NAME = {case.name: case for case in CASES}
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)  # a race is an exception
PREFILL = (
    dataclasses.replace(BY_NAME["empty rows"], q_len=100, kv_len=150, num_q_heads=2, num_kv_heads=1),
    dataclasses.replace(
        BY_NAME["soft cap and sinks"], head_dim=80, q_len=140, kv_len=140, num_q_heads=1, num_kv_heads=1
    ),
)
DECODE = (
    dataclasses.replace(BY_NAME["decode a few columns"], num_kv_heads=1),
    dataclasses.replace(BY_NAME["decode in a window"], num_kv_heads=1, head_dim=256, kv_len=655),
)
EVERY = tuple(case for case in CASES if case.kv_len <= 400 or case.q_len == 1)
PAGE_ROWS = 16


def rounded_inputs(case: Case):
    *arrays, lo, hi, sinks = case.inputs()
    return *(jnp.asarray(x, jnp.bfloat16) for x in arrays), lo, hi, sinks


def report(case: Case, form: str, out: jax.Array, expected: np.ndarray) -> None:
    """Prints the largest difference from the float64 oracle, relative to the largest value."""
    error = np.abs(np.asarray(out, np.float64) - expected).max() / (np.abs(expected).max() or 1)
    print(json.dumps({"case": case.name, "form": form, "error": float(error)}), flush=True)


def oracle(case: Case, query, key, value, lo, hi, sinks) -> np.ndarray:
    arrays = (np.asarray(x, np.float64) for x in (query, key, value))
    return oracles.span_attention(*arrays, lo, hi, sinks, **case.options)


def prefill(case: Case) -> None:
    *arrays, sinks = inputs = rounded_inputs(case)
    blocks = BlockSizes(block_kv=64, stages=2)
    attend = functools.partial(span_attention_gpu, blocks=blocks, interpret=INTERPRET, **case.options)
    report(case, "prefill", jax.jit(attend)(*arrays, sinks=sinks), oracle(case, *inputs))


def decode(case: Case) -> None:
    *arrays, sinks = inputs = rounded_inputs(case)
    math = TileMath(case.softmax_scale, case.logits_soft_cap, INTERPRET)
    blocks = DecodeBlocks(block_kv=64, stages=2, splits=2)
    attend = functools.partial(decode_attention_gpu, math, blocks=blocks)
    report(case, "decode", jax.jit(attend)(*arrays, sinks), oracle(case, *inputs))


def paged(case: Case) -> None:
    """The decode case over pages in any order, its columns in any order, with a padding column."""
    query, key, value, lo, hi, _ = rounded_inputs(case)
    draw = np.random.default_rng(0)
    pages_a_row = -(-case.kv_len // PAGE_ROWS)
    tables = draw.permutation(case.batch * pages_a_row + 3)[: case.batch * pages_a_row]
    tables = tables.reshape(case.batch, pages_a_row).astype(np.int32)

    def pages(rows):
        behind = pages_a_row * PAGE_ROWS - case.kv_len
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, behind), (0, 0)), constant_values=jnp.nan)
        rows = rows.reshape(case.batch, case.num_kv_heads, pages_a_row, PAGE_ROWS, case.head_dim)
        empty = jnp.full(
            (case.batch * pages_a_row + 3, *rows.shape[1:2], *rows.shape[3:]), jnp.nan, rows.dtype
        )
        return empty.at[tables].set(rows.transpose(0, 2, 1, 3, 4))

    order = draw.permutation(case.batch * case.q_len)
    columns = [x.reshape(-1, *x.shape[2:])[order] for x in (query, jnp.asarray(lo), jnp.asarray(hi))]
    columns = [jnp.concatenate([x, x[:1]]) for x in columns]
    ids = np.append(np.repeat(np.arange(case.batch), case.q_len)[order], -1).astype(np.int32)
    math = TileMath(case.softmax_scale, case.logits_soft_cap, INTERPRET)
    blocks = DecodeBlocks(block_kv=64, stages=2, splits=1)
    attend = functools.partial(paged_attention_gpu, math, blocks=blocks)
    out = jax.jit(attend)(columns[0], pages(key), pages(value), tables, ids, *columns[1:])
    want = oracle(case, query, key, value, lo, hi, None).reshape(-1, *out.shape[1:])[order]
    report(case, "paged", out, np.concatenate([want, np.zeros_like(want[:1])]))


RUNS = {
    "small": [
        *((prefill, case) for case in PREFILL),
        *((decode, case) for case in DECODE),
        (paged, DECODE[1]),
    ],
    "all": [
        *((prefill, case) for case in EVERY),
        *((decode, case) for case in EVERY if case.q_len <= 5),
        *((paged, case) for case in EVERY if case.q_len == 1),
    ],
}


def main(name: str) -> None:
    for run, case in RUNS[name]:
        run(case)


if __name__ == "__main__":
    main(sys.argv[1])
