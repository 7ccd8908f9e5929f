"""Checks the GPU kernels on a GPU, then times them, in minutes: JSON on stdout, progress on stderr.

    python3 benchmarks/gpu_device.py [--quick] [--out FILE]

Needs a Hopper GPU, jax 0.11.2 or newer with CUDA, and this repository's files: no other package. What
compares with another package says in its result when that is missing. A case that fails is reported and
the next one runs; the exit code is 1 when a check failed.

Times are medians over rounds in which the contenders take turns. Bandwidth and matmul ceilings are measured
in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.span_attention import available_implementations, span_attention
from pallas_kernels.span_attention.cases import CASES
from pallas_kernels.span_attention.reference import span_attention_reference

GPU = "pallas_gpu"
TOLERANCE = 2e-2


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def guarded(function: Callable[[], dict]) -> dict:
    """What `function` returns, or its failure as a result."""
    try:
        return function()
    except Exception as error:
        say(traceback.format_exc(limit=4))
        return {"failed": f"{type(error).__name__}: {error}"[:600]}


# Checks


def check(case) -> dict:
    """One case in bfloat16 against the reference in float32 of the same rounded inputs."""
    query, key, value, lo, hi, sinks = case.inputs()
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (query, key, value)]
    attend = jax.jit(functools.partial(span_attention, implementation=GPU, **case.options))
    out = np.asarray(attend(*arrays, lo, hi, sinks=sinks), np.float32)
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in arrays]
        want = np.asarray(span_attention_reference(*wide, lo, hi, sinks=sinks, **case.options))
    error = float(np.abs(out - want).max() / (np.abs(want).max() or 1))
    return {"error": error, "right": error < TOLERANCE}


def check_long(head_dim: int, length: int) -> dict:
    """Causal attention of whole blocks, long enough that rings and turns go round many times."""
    arrays, lo, hi = prefill_inputs(head_dim, length, heads=(4, 2))
    out = causal_spans(head_dim)(*arrays, lo, hi)
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in arrays]
        want = span_attention_reference(*wide, lo, hi, softmax_scale=head_dim**-0.5)
    error = float(jnp.abs(out.astype(jnp.float32) - want).max() / jnp.abs(want).max())
    return {"error": error, "right": error < TOLERANCE}


def check_paged(page_rows: int) -> dict:
    """Columns of several sequences over shuffled pages against each sequence's own rows."""
    from pallas_kernels.span_attention.gpu_decode import paged_attention_gpu
    from pallas_kernels.span_attention.gpu_tile import TileMath

    draw = np.random.default_rng(0)
    sequences, pages_a_row, heads, head_dim = 3, 512 // page_rows, (8, 2), 128
    rows = sequences, heads[1], pages_a_row * page_rows, head_dim
    key, value = (jnp.asarray(draw.normal(size=rows), jnp.bfloat16) for _ in range(2))
    query = jnp.asarray(draw.normal(size=(sequences, 2, heads[0], head_dim)), jnp.bfloat16)
    hi = jnp.asarray([[400, 401], [3, 4], [510, 511]], jnp.int32)
    lo = jnp.maximum(hi - 300, 0)
    tables = draw.permutation(sequences * pages_a_row).reshape(sequences, pages_a_row)

    def pages(x):
        x = x.reshape(sequences, heads[1], pages_a_row, page_rows, head_dim).transpose(0, 2, 1, 3, 4)
        return jnp.zeros((sequences * pages_a_row, *x.shape[2:]), x.dtype).at[tables].set(x)

    ids = jnp.repeat(jnp.arange(sequences, dtype=jnp.int32), 2)
    attend = jax.jit(functools.partial(paged_attention_gpu, TileMath(head_dim**-0.5, None)))
    flat = (x.reshape(-1, *x.shape[2:]) for x in (query, lo, hi))
    q, lo_columns, hi_columns = flat
    tables = jnp.asarray(tables, jnp.int32)
    out = attend(q, pages(key), pages(value), tables, ids, lo_columns, hi_columns)
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in (query, key, value)]
        want = span_attention_reference(*wide, lo, hi, softmax_scale=head_dim**-0.5).reshape(out.shape)
    error = float(jnp.abs(out.astype(jnp.float32) - want).max() / jnp.abs(want).max())
    return {"error": error, "right": error < TOLERANCE}


# Times


def seconds(contenders: dict[str, Callable[[], jax.Array]], rounds: int, calls: int) -> dict[str, float]:
    """Median seconds a call; contenders take turns, each `calls` calls in a row between two waits."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        jax.block_until_ready(call())
    for _ in range(rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            out = [call() for _ in range(calls)]
            jax.block_until_ready(out)
            taken[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(times) for name, times in taken.items()}


def ceilings(rounds: int) -> dict:
    """What copying and multiplying reach here: GB/s (read and written) and bfloat16 TFLOP/s."""
    big = jnp.zeros((2**30,), jnp.bfloat16)
    left = jnp.ones((8192, 8192), jnp.bfloat16)
    copy, product = jax.jit(lambda x: x + 1), jax.jit(lambda x: x @ x)
    found = seconds({"copy": lambda: copy(big), "matmul": lambda: product(left)}, rounds, 4)
    return {
        "copy_gb_s": 2 * big.nbytes / found["copy"] / 1e9,
        "matmul_tflop_s": 2 * 8192**3 / found["matmul"] / 1e12,
    }


def prefill_inputs(head_dim: int, length: int, heads: tuple[int, int], window: int | None = None):
    draw = jax.random.split(jax.random.key(0), 3)
    shapes = (1, length, heads[0], head_dim), *[(1, heads[1], length, head_dim)] * 2
    arrays = [jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(draw, shapes, strict=True)]
    rows = jnp.arange(length, dtype=jnp.int32)[None]
    return arrays, jnp.zeros_like(rows) if window is None else jnp.maximum(rows - window + 1, 0), rows


def causal_spans(head_dim: int):
    return jax.jit(functools.partial(span_attention, softmax_scale=head_dim**-0.5, implementation=GPU))


def time_prefill(head_dim: int, length: int, rounds: int) -> dict:
    """Causal attention, 16 query and 4 key heads: ours, ours in a window, cuDNN, jax's own, tokamax."""
    arrays, lo, hi = prefill_inputs(head_dim, length, (16, 4))
    windowed = prefill_inputs(head_dim, length, (16, 4), window=1024)[1]
    ours = causal_spans(head_dim)
    by_row = [arrays[0], *(x.swapaxes(1, 2) for x in arrays[1:])]  # [B, S, K, H]
    cudnn = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"))
    contenders = {
        "spans": lambda: ours(*arrays, lo, hi),
        "spans, window 1024": lambda: ours(*arrays, windowed, hi),
        "cudnn": lambda: cudnn(*by_row),
        "jax attention_mgpu": functools.partial(jax_attention(head_dim), by_row),
    }
    missing = {}
    if importlib.util.find_spec("tokamax"):
        import tokamax  # pyright: ignore[reportMissingImports]

        peer = jax.jit(functools.partial(tokamax.dot_product_attention, is_causal=True))
        contenders["tokamax"] = lambda: peer(*by_row)
    else:
        missing["tokamax"] = "not installed"
    for name, call in list(contenders.items()):
        if "failed" in (
            outcome := guarded(lambda call=call: {"ran": bool(jax.block_until_ready(call()).size)})
        ):
            missing[name] = outcome["failed"]
            del contenders[name]
    found = seconds(contenders, rounds, 8)
    flops = 2 * 2 * length * length * head_dim * 16 / 2
    return {
        "ms": {name: 1e3 * x for name, x in found.items()},
        "tflop_s": {name: flops / x / 1e12 for name, x in found.items() if "window" not in name},
        "missing": missing,
    }


def jax_attention(head_dim: int) -> Callable:
    """jax's causal kernel; it takes float16 buffers, so its inputs are cast before the first call."""
    cast: list[jax.Array] = []

    def call(arrays):
        from jax.experimental.pallas.ops.gpu import attention_mgpu

        block_kv = 128 if head_dim <= 128 else 64
        config = attention_mgpu.TuningConfig(
            block_q=64, block_kv=block_kv, max_concurrent_steps=2, causal=True
        )
        if not cast:
            cast.extend(x.astype(jnp.float16) for x in arrays)
        return attention_mgpu.attention(*cast, config)

    return call


def time_decode(head_dim: int, batch: int, length: int, copy_gb_s: float, rounds: int) -> dict:
    """One query a row, 16 query and 2 key heads: how near reading comes to copying's bandwidth."""
    draw = jax.random.split(jax.random.key(0), 3)
    rows = (batch, 2, length, head_dim)
    query = jax.random.normal(draw[0], (batch, 1, 16, head_dim), jnp.bfloat16)
    key, value = (jax.random.normal(k, rows, jnp.bfloat16) for k in draw[1:])
    lo, hi = jnp.zeros((batch, 1), jnp.int32), jnp.full((batch, 1), length - 1, jnp.int32)
    forms = {
        name: jax.jit(functools.partial(span_attention, softmax_scale=head_dim**-0.5, implementation=name))
        for name in (GPU, "xla")
    }
    contenders = {name: functools.partial(form, query, key, value, lo, hi) for name, form in forms.items()}
    found = seconds(contenders, rounds, 8)
    read_gb_s = (key.nbytes + value.nbytes) / found[GPU] / 1e9
    return {
        "us": {name: 1e6 * x for name, x in found.items()},
        "read_gb_s": read_gb_s,
        "share_of_copy": read_gb_s / copy_gb_s,
    }


def end_to_end(rounds: int) -> dict:
    """Tokens a second of a model of Gemma 3 270M's sizes, random weights, with each implementation."""
    needed = ("flax", "gguf", "jinja2", "safetensors", "tokenizers")  # what importing jaxinfer needs
    if missing := [name for name in needed if not importlib.util.find_spec(name)]:
        return {"skipped": f"jaxinfer needs {', '.join(missing)}, not installed here"}
    import jaxinfer as ji
    from jaxinfer.config import LayerConfig, LayerKind, RopeConfig
    from jaxinfer.testing import random_params, tiny_config

    layer = LayerConfig(LayerKind.FULL_ATTENTION, rope=RopeConfig(1_000_000.0, 256))
    sizes = dict(vocab_size=262_144, embed_dim=640, mlp_dim=2048, num_q_heads=4, num_kv_heads=1, head_dim=256)
    config = dataclasses.replace(
        tiny_config("qwen3"),
        **sizes,
        layers=(layer,) * 18,
        max_positions=32_768,
        softmax_scale=1 / 16,
        dtype="bfloat16",
        tie_embeddings=True,
    )
    params, batch, steps = random_params(config), 8, 64
    prompt = jnp.ones((batch, 2048), jnp.int32)
    found = {}
    for name in (GPU, "xla"):
        step = jax.jit(functools.partial(ji.forward, config=config, implementation=name), donate_argnums=2)
        taken: dict[str, list[float]] = {"prefill": [], "decode": []}
        for _ in range(1 + max(3, rounds // 3)):  # the first compiles
            state = ji.init_state(config, batch=batch, capacity=4096)
            start = time.perf_counter()
            logits, state = step(params, prompt, state)
            jax.block_until_ready(logits)
            middle = time.perf_counter()
            for _ in range(steps):
                token = jnp.argmax(logits, axis=-1)[:, None].astype(jnp.int32)
                logits, state = step(params, token, state)
            jax.block_until_ready(logits)
            taken["prefill"].append(prompt.size / (middle - start))
            taken["decode"].append(batch * steps / (time.perf_counter() - middle))
        found[name] = {part: statistics.median(rates[1:]) for part, rates in taken.items()}
    return {"tokens_s": found, "batch": batch, "prompt": prompt.shape[1]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds")
    parser.add_argument("--out", type=Path, help="write the JSON here too, after every part")
    args = parser.parse_args()
    if refusal := available_implementations()[GPU]:
        raise SystemExit(f"the Mosaic GPU kernels do not run here: {refusal}")
    rounds = 5 if args.quick else 15
    result: dict = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}

    def part(name: str, key: str, function: Callable[[], dict]) -> None:
        say(f"{name}: {key}")
        result.setdefault(name, {})[key] = guarded(function)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    for head_dim in (64, 128, 256):
        part("checks", f"causal 4096, d{head_dim}", functools.partial(check_long, head_dim, 4096))
    for page_rows in (16, 128):
        part("checks", f"pages of {page_rows}", functools.partial(check_paged, page_rows))
    for case in CASES[:: 4 if args.quick else 1]:
        part("checks", case.name, functools.partial(check, case))
    part("times", "ceilings", functools.partial(ceilings, rounds))
    copy_gb_s = result["times"]["ceilings"].get("copy_gb_s", float("nan"))
    for head_dim in (128, 64, 256):
        part("times", f"prefill 8192, d{head_dim}", functools.partial(time_prefill, head_dim, 8192, rounds))
    for head_dim, batch, length in ((128, 32, 8192), (128, 1, 65536), (64, 32, 8192), (256, 16, 8192)):
        measure = functools.partial(time_decode, head_dim, batch, length, copy_gb_s, rounds)
        part("times", f"decode d{head_dim}, {batch} x {length}", measure)
    part("times", "end to end", functools.partial(end_to_end, rounds))
    print(json.dumps(result, indent=1))
    wrong = [name for name, outcome in result["checks"].items() if not outcome.get("right")]
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
