"""Prefill, decode, start and memory, beside other libraries; one command, JSON out.

    python -m benchmarks.end_to_end --peer-python TORCH_ENV/bin/python --llama-python LLAMA_ENV/bin/python

Every contender is a process of its own that stays alive and idle while another one runs. `--help` says what
can be chosen; `python -m benchmarks.tables` makes the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contender import NATIVE, Contender, ContenderError, Entry
from benchmarks.machine import HUGE_PAGES, ROOT, machine_record, pin_threads, wait_until_quiet
from benchmarks.peers import LLAMA_CPP, OWN, PEER_DTYPES, TRANSFORMERS, ModelFile, Peers
from benchmarks.rounds import Conditions, Measured, measure, ratio
from benchmarks.start_up import time_starts

_GENERATE_PROMPT, _GENERATE_NEW = 512, 64
_HOST_PROMPT = 64
_FIRST_ID = 1000  # below lie control tokens and single bytes


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if bad := [context for context in args.contexts if context <= args.steps]:
        raise SystemExit(f"--contexts must be more than --steps, {args.steps}; got {bad}")
    cpus = pin_threads(args.threads)
    model, peers = ModelFile(args.model, args.peer_model), Peers.checked(args)
    load = wait_until_quiet(cpus, args.max_foreign_load, 0 if args.force else args.patience_s)
    if load is not None and load > args.max_foreign_load and not args.force:
        print(
            f"other processes use {load:.2f} cores; wait for them to end, allow more with "
            "--max-foreign-load, or measure all the same with --force",
            file=sys.stderr,
        )
        return 1
    conditions = Conditions(cpus, args.repeats, args.cell_s, args.max_foreign_load, args.force)
    harness = Harness(args, model, peers, conditions)
    harness.run()
    for failure in harness.failures:
        print(f"failed: {failure}", file=sys.stderr)
    print(f"wrote {args.out or _default_out(args, harness.record)}", file=sys.stderr)
    return 1 if harness.failures else 0


class Harness:
    """One run. `record` is complete after every measurement, and written then."""

    def __init__(self, args: argparse.Namespace, model: ModelFile, peers: Peers, conditions: Conditions):
        self._args, self._model, self._peers, self._conditions = args, model, peers, conditions
        self.failures: list[str] = []
        malloc = HUGE_PAGES if args.malloc == "huge" else "glibc's own"
        self.record: dict[str, Any] = {
            "benchmark": "end_to_end",
            "model": model.name,
            "file": model.file,
            "environment": machine_record(args.threads, malloc),
            "settings": {
                "repeats": args.repeats,
                "steps": args.steps,
                "max_foreign_load": args.max_foreign_load,
                "forced": args.force,
            },
            "contenders": {},
            "cells": [],
        }

    def run(self) -> None:
        """Measures everything that was asked for; what fails is told in `failures`."""
        began = time.perf_counter()
        with contextlib.ExitStack() as stack:
            contenders = [stack.enter_context(found) for found in self._started(self._entries())]
            if all(contender.entry.library != OWN for contender in contenders):
                raise SystemExit("nothing to measure: " + "; ".join(self.failures))
            own = [contender for contender in contenders if contender.entry.library == OWN]
            self._say("the machine's limits")
            self.record["limits"] = own[0].request("limits")
            self._measure_prefill(contenders)
            self._measure_decode(contenders)
            for contender in (contender for contender in own if contender.is_alive):
                self._measure_host(contender)
        self._measure_memory()
        self._measure_starts()
        # Which, not why: a message may name paths of this machine.
        self.record["failures"] = [": ".join(failure.split(": ")[:2]) for failure in self.failures]
        self.record["wall_s"] = round(time.perf_counter() - began, 1)
        self._write()

    def _measure_host(self, contender: Contender) -> None:
        """What a token costs in this library's own Python, and what has been compiled so far."""
        facts = self.record["contenders"][contender.entry.name]
        facts["compiles"] = contender.request("compiles")
        self._say(f"host overhead of {contender.entry.name}")
        try:
            facts |= contender.request("host_overhead", tokens=self._tokens([contender], _HOST_PROMPT))
        except ContenderError as error:
            self.failures.append(str(error))
        self._write()

    def _entries(self) -> list[Entry]:
        modes = ("", NATIVE) if self._args.native else ("",)
        own = [Entry(OWN, dtype, mode) for dtype in self._args.dtypes for mode in modes]
        return [*own, *self._peers.entries(self._model)]

    def _started(self, entries: Iterable[Entry]) -> Iterable[Contender]:
        for entry in entries:
            self._say(f"loading {entry.name}")
            try:
                contender = Contender(entry, self._peers.command(entry, self._model), self._args.malloc)
            except ContenderError as error:
                self.failures.append(str(error))
                continue
            hello = contender.hello
            self.record["contenders"].setdefault(entry.name, {}).update(
                library=entry.library, dtype=entry.dtype, mode=entry.mode, versions=hello["versions"]
            )
            for key in ("device", "platform", "kv_dtype", "load_s", "build", "num_layers", "params_bytes"):
                if key in hello:
                    self.record["contenders"][entry.name][key] = hello[key]
            yield contender

    def _measure_prefill(self, contenders: list[Contender]) -> None:
        able = [contender for contender in contenders if contender.entry.mode in ("", NATIVE)]
        for length in self._args.prefill:
            arguments = {"tokens": self._tokens(able, length), "runs": max(1, 512 // length)}
            self._say(f"prefill {length}")
            found = measure(able, "prefill", arguments, self._conditions)
            self._add_cell({"measure": "prefill", "tokens": length, "batch": 1}, length, found)

    def _measure_decode(self, contenders: list[Contender]) -> None:
        steps = self._args.steps
        for context in self._args.contexts:
            for batch in self._args.batches:
                self._say(f"decode, batch {batch}, context {context}")
                # The steps that are timed end at the context, so that it also is the capacity.
                prompt = self._tokens(contenders, context - steps)
                chosen = [
                    c for c in contenders if c.entry.mode in ("", NATIVE) or self._is_chosen(context, batch)
                ]
                able = [c for c in chosen if self._begins(c, tokens=prompt, batch=batch, steps=steps)]
                found = measure(able, "decode", {"steps": steps}, self._conditions)
                what = {"measure": "decode", "context": context, "batch": batch, "steps": steps}
                self._add_cell(what, batch * steps, found)
                for contender in able:
                    if contender.is_alive:
                        contender.request("decode_end")

    def _is_chosen(self, context: int, batch: int) -> bool:
        """Returns whether other modes than eager are measured there: each cell compiles for a minute."""
        return self._args.compiled_at is None or f"{context}x{batch}" in self._args.compiled_at

    def _begins(self, contender: Contender, **arguments: Any) -> bool:
        if not contender.is_alive:
            return False
        try:
            contender.request("decode_begin", timeout_s=600, **arguments)
        except ContenderError as error:
            self.failures.append(str(error))
            return False
        return True

    def _measure_memory(self) -> None:
        """Peak memory of a fresh process that loads and generates, and what it compiles for that."""
        for entry in (entry for entry in self._entries() if not entry.mode):
            for contender in self._started([entry]):
                with contender:
                    self._say(f"memory of {entry.name}")
                    try:
                        prompt = self._tokens([contender], _GENERATE_PROMPT)
                        contender.request("generate", timeout_s=600, tokens=prompt, new_tokens=_GENERATE_NEW)
                        peak = contender.request("peak")
                        compiles = contender.request("compiles") if entry.library == OWN else None
                    except ContenderError as error:
                        self.failures.append(str(error))
                        continue
                imports = contender.hello["imports_peak_bytes"]
                self.record["contenders"][entry.name]["generate"] = {
                    "prompt_tokens": _GENERATE_PROMPT,
                    "new_tokens": _GENERATE_NEW,
                    "peak_above_imports_bytes": None if imports is None else peak["peak_bytes"] - imports,
                    "device_peak_bytes": peak.get("device_peak_bytes"),
                    **({} if compiles is None else {"compiles": compiles}),
                }
                self._write()

    def _measure_starts(self) -> None:
        if self._args.start_repeats < 1:
            return
        self._say("start to first token")
        dtype = self._args.dtypes[0]
        try:
            self.record["start"] = time_starts(
                self._model.argument,
                dtype,
                self._peers.starts(self._model, dtype),
                repeats=self._args.start_repeats,
                cpus=self._conditions.cpus,
            )
        except RuntimeError as error:
            self.failures.append(str(error))

    def _tokens(self, contenders: Sequence[Contender], count: int) -> list[int]:
        """Returns `count` token ids, the same in every run."""
        top = min(contender.hello["vocab_size"] for contender in contenders)
        draw = random.Random(0)
        return [draw.randrange(min(_FIRST_ID, top // 2), top) for _ in range(count)]

    def _add_cell(self, what: dict[str, Any], tokens: int, found: dict[str, Measured]) -> None:
        self.failures += [measured.failure for measured in found.values() if measured.failure]
        good = {name: measured for name, measured in found.items() if measured.samples}
        limit = self._conditions.max_foreign_load
        cell = {**what, "results": {name: _summary(m, tokens, limit) for name, m in good.items()}}
        cell["ratios"] = {
            name: _ratios(name, good, self.record["contenders"])
            for name in good
            if name.startswith(f"{OWN}/")
        }
        self.record["cells"].append(cell)
        self._write()

    def _write(self) -> None:
        out = Path(self._args.out or _default_out(self._args, self.record))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(self.record, indent=1) + "\n")

    def _say(self, what: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def _summary(measured: Measured, tokens: int, limit: float) -> dict[str, Any]:
    foreign = measured.foreign_load
    return {
        "median_ms": round(1e3 * measured.median_s, 3),
        "tokens_per_s": round(tokens / measured.median_s, 1),
        "samples_ms": [round(1e3 * sample.seconds, 3) for sample in measured.samples],
        "first_ms": round(1e3 * measured.first_s, 1),
        "foreign_load": None if foreign is None else round(foreign, 3),
        "disturbed_samples": sum(sample.load.exceeds(limit) for sample in measured.samples),
        "tokens": list(measured.samples[0].tokens),
    }


def _ratios(
    name: str, found: dict[str, Measured], contenders: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Returns how many times as fast as the best peer ours is: of its own dtype, and of any."""
    peers = {other: m for other, m in found.items() if contenders[other]["library"] != OWN}
    kin = {other: m for other, m in peers.items() if contenders[other]["dtype"] == contenders[name]["dtype"]}
    best: dict[str, dict[str, Any]] = {}
    for kind, among in (("same_dtype", kin), ("any", peers)):
        if among:
            peer = min(among, key=lambda other: among[other].median_s)
            best[kind] = {"peer": peer, "times_as_fast": round(ratio(among[peer], found[name]), 3)}
    return best


def _default_out(args: argparse.Namespace, record: dict[str, Any]) -> Path:
    versions = next(c["versions"] for c in record["contenders"].values() if c["library"] == OWN)
    return ROOT / "benchmarks" / "results" / f"end_to_end-{record['model']}-jax{versions['jax']}.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.end_to_end", description=__doc__.partition("\n")[0]
    )
    add: Callable[..., Any] = parser.add_argument
    add("--model", default="smollm2-135m", help="a known name, a .gguf file or a directory")
    add(
        "--dtypes",
        nargs="+",
        default=["bfloat16", "float32"],
        help="of the weights; the first is started too",
    )
    add("--native", action="store_true", help="also with the compiled native kernels")
    add("--out", help="default: benchmarks/results/end_to_end-MODEL-jaxVERSION.json")
    both = [TRANSFORMERS, LLAMA_CPP]
    add("--peers", nargs="*", choices=both, default=both, help="none: --peers alone")
    add("--peer-python", metavar="PATH", help="transformers' interpreter; default: this one")
    add("--llama-python", metavar="PATH", help="llama.cpp's interpreter; default: this one")
    add("--peer-model", metavar="DIR", help="what transformers reads instead of the same GGUF file")
    add("--peer-dtypes", nargs="+", choices=PEER_DTYPES, default=PEER_DTYPES, help="of transformers")
    add(
        "--peer-modes",
        nargs="+",
        choices=["eager", "compiled"],
        default=["eager"],
        help="the best one counts",
    )
    add("--compiled-at", nargs="*", metavar="CONTEXTxBATCH", help="default: everywhere")
    add("--prefill", type=int, nargs="*", default=[128, 512, 2048], help="tokens")
    add("--contexts", type=int, nargs="*", default=[512, 4096], help="positions that decoding ends at")
    add("--batches", type=int, nargs="*", default=[1, 8])
    add("--steps", type=int, default=16, help="decode steps a sample")
    add("--repeats", type=int, default=5, help="rounds of each measurement")
    add("--start-repeats", type=int, default=3, help="rounds of starts; 0: none")
    add("--cell-s", type=float, default=60, help="seconds after which a measurement ends early")
    add("--threads", type=int, default=2)
    add("--malloc", choices=["huge", "plain"], default="huge", help="huge: huge pages, for every contender")
    add("--max-foreign-load", type=float, default=0.1, help="cores that other processes may use")
    add("--patience-s", type=float, default=120, help="how long to wait for other processes to end")
    add("--force", action="store_true", help="measure whatever else runs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
