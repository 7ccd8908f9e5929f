"""`jaxinfer bench`: how fast a model runs here, beside what the machine can do."""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.exit_codes import OK, UsageError
from jaxinfer.cli.interrupts import in_thread
from jaxinfer.cli.model_source import add_model_options, load_model
from jaxinfer.cli.sizes import format_bytes
from jaxinfer.cli.terminal import render, stage, write_json, write_out
from jaxinfer.loading.known_models import DEFAULT_MODEL

if TYPE_CHECKING:
    from jaxinfer.models import Model

_MIN_SAMPLE_TOKENS = 256  # of prefill in one sample: shorter prompts run several times


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    parser.add_argument(
        "--prefill", type=int, nargs="*", default=[128, 512], metavar="N", help="prompt tokens"
    )
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8], metavar="N", help="rows that decode")
    parser.add_argument(
        "--context", type=int, default=512, metavar="N", help="positions at which decoding ends; default 512"
    )
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="tokens a row in a sample")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="samples; the median counts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    _check(args)
    model, load_s = load_model(args)
    most = max([args.context, *args.prefill])
    if most > model.config.max_positions:
        raise UsageError(f"the model has {model.config.max_positions:,} positions; asked are {most:,}")
    record = {"model": args.model or DEFAULT_MODEL, "load_s": round(load_s, 3), **_measure(model, args)}
    if args.json:
        write_json(record)
    else:
        write_out(_report(record))
    return OK


def _check(args: argparse.Namespace) -> None:
    from jaxinfer.generation.decode import MAX_STEPS

    if not 1 <= args.steps <= MAX_STEPS:
        raise UsageError(f"--steps must be in 1..{MAX_STEPS}; got {args.steps}")
    if args.context <= args.steps:
        raise UsageError(f"--context must be more than --steps, {args.steps}; got {args.context}")
    if min([args.repeats, *args.prefill, *args.batch]) < 1:
        raise UsageError("--prefill, --batch and --repeats must be at least 1")


def _measure(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    import jax

    from jaxinfer.cli.facts import environment_facts
    from jaxinfer.measuring.compiles import CompileLedger
    from jaxinfer.measuring.limits import machine_limits, num_threads

    facts = environment_facts()
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    with stage("measuring the machine"):
        limits = in_thread(machine_limits)
    ledger = CompileLedger()
    try:
        rows = _prefill_rows(model, args) + _decode_rows(model, args, weight_bytes, limits["read_gb_s"])
        compiles = ledger.record()
    finally:
        ledger.close()
    return {
        "dtype": model.config.dtype,
        "weight_bytes": weight_bytes,
        "versions": facts["versions"],
        "devices": facts["devices"],
        "threads": num_threads(),
        "limits": limits,
        "compiles": compiles,
        "rows": rows,
    }


def _prefill_rows(model: Model, args: argparse.Namespace) -> list[dict[str, Any]]:
    from jaxinfer.measuring.speed import time_prefill

    rows = []
    for length in args.prefill:
        prompt, runs = _prompt(model, length), math.ceil(_MIN_SAMPLE_TOKENS / length)
        with stage(f"prefill {length}"):
            first_s, median_s = _samples(lambda: time_prefill(model, prompt, runs)[0], args.repeats)  # noqa: B023
        rows.append({"measure": "prefill", "tokens": length, "batch": 1, **_times(first_s, median_s, length)})
    return rows


def _decode_rows(
    model: Model, args: argparse.Namespace, weight_bytes: int, read_gb_s: float
) -> list[dict[str, Any]]:
    from jaxinfer.measuring.speed import DecodeClock

    rows, steps = [], args.steps
    prompt = _prompt(model, args.context - steps)
    for batch in args.batch:
        with stage(f"decode, batch {batch}"):
            clock = in_thread(lambda: DecodeClock(model, prompt, batch=batch, steps=steps))  # noqa: B023
            first_s, median_s = _samples(lambda: clock.time(steps)[0], args.repeats)  # noqa: B023
        weights_gb_s = weight_bytes * steps / median_s / 1e9
        rows.append(
            {
                "measure": "decode",
                "context": args.context,
                "batch": batch,
                **_times(first_s, median_s, batch * steps),
                "weights_gb_s": round(weights_gb_s, 2),
                "share_of_read_bandwidth": round(weights_gb_s / read_gb_s, 3),
            }
        )
    return rows


def _samples(sample: Callable[[], float], repeats: int) -> tuple[float, float]:
    """Returns (seconds of the first run, which compiles; the median of those after it)."""
    first, *others = in_thread(lambda: [sample() for _ in range(repeats + 1)])
    return first, statistics.median(others)


def _times(first_s: float, median_s: float, tokens: int) -> dict[str, float]:
    return {
        "median_ms": round(1e3 * median_s, 3),
        "first_ms": round(1e3 * first_s, 1),
        "tokens_per_s": round(tokens / median_s, 1),
    }


def _prompt(model: Model, length: int) -> list[int]:
    """Returns token ids, the same in every run."""
    draw = random.Random(0)
    return [draw.randrange(model.config.vocab_size) for _ in range(length)]


def _report(record: dict[str, Any]) -> str:
    from rich.table import Table
    from rich.text import Text

    limits = record["limits"]
    device = record["devices"][0]
    machine = (
        f"{device['kind']}, {record['threads']} threads: reads {limits['read_gb_s']} GB/s, copies "
        f"{limits['copy_gb_s']} GB/s (read and written), multiplies {limits['matmul_float32_gflop_s']:,} "
        f"(float32) and {limits['matmul_bfloat16_gflop_s']:,} GFLOP/s (bfloat16)"
    )
    compiles = record["compiles"]
    model = (
        f"{record['model']}, {record['dtype']}, {format_bytes(record['weight_bytes'])} of weights: loaded in "
        f"{record['load_s']:.2f} s; {compiles['programs']} programs in {compiles['compile_s']:.1f} s"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("MEASURE", no_wrap=True)
    for heading in ("FIRST ms", "MEDIAN ms", "TOKENS/s", "WEIGHTS GB/s", "OF READING"):
        table.add_column(heading, justify="right")
    for row in record["rows"]:
        table.add_row(_label(row), f"{row['first_ms']:,.0f}", f"{row['median_ms']:,.1f}", *_rates(row))
    versions = " · ".join(f"{name} {version}" for name, version in record["versions"].items())
    return render(Text(versions, style="dim"), Text(machine), Text(model), "", table)


def _label(row: dict[str, Any]) -> str:
    if row["measure"] == "prefill":
        return f"prefill {row['tokens']:,}"
    return f"decode x{row['batch']} at {row['context']:,}"


def _rates(row: dict[str, Any]) -> tuple[str, str, str]:
    rate = f"{row['tokens_per_s']:,.0f}"
    if "weights_gb_s" not in row:
        return rate, "", ""
    return rate, f"{row['weights_gb_s']:.1f}", f"{row['share_of_read_bandwidth']:.0%}"
