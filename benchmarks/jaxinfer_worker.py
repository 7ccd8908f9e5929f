"""A contender: this library, through `jaxinfer.measuring`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import jax
import jaxlib

import jaxinfer as ji
from benchmarks.contender import NATIVE
from benchmarks.worker import peak_bytes, serve
from jaxinfer.generation import kv_dtype
from jaxinfer.measuring.compiles import CompileLedger
from jaxinfer.measuring.limits import machine_limits
from jaxinfer.measuring.speed import DecodeClock, host_overhead_s, time_prefill
from jaxinfer.ops import attention_implementations


class JaxinferWorker:
    """One model and, from `decode_begin` to `decode_end`, one batch in the middle of decoding."""

    def __init__(self, name_or_path: str, dtype: str):
        began = time.perf_counter()
        self._model = ji.load(name_or_path, dtype=dtype)
        jax.block_until_ready(self._model.params)
        self.load_s = time.perf_counter() - began
        self._clock: DecodeClock | None = None

    def facts(self) -> dict[str, Any]:
        config = self._model.config
        return {
            "load_s": self.load_s,
            "vocab_size": config.vocab_size,
            "max_positions": config.max_positions,
            "kv_dtype": kv_dtype(config),
            "num_layers": len(config.layers),
            "params_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(self._model.params)),
        }

    def prefill(self, tokens: list[int], runs: int) -> dict[str, Any]:
        seconds, token = time_prefill(self._model, tokens, runs)
        return {"seconds": seconds, "tokens": [token]}

    def decode_begin(self, tokens: list[int], batch: int, steps: int) -> dict[str, Any]:
        """Takes `batch` rows of the same prompt, with room for `steps` more tokens."""
        self._clock = DecodeClock(self._model, tokens, batch=batch, steps=steps)
        return {}

    def decode(self, steps: int) -> dict[str, Any]:
        """Returns the seconds that `steps` tokens a row take, and row 0's; goes back to the prompt after."""
        if self._clock is None:
            raise ValueError("decode() needs decode_begin()")
        seconds, tokens = self._clock.time(steps)
        return {"seconds": seconds, "tokens": tokens}

    def decode_end(self) -> dict[str, Any]:
        self._clock = None
        return {}

    def generate(self, tokens: list[int], new_tokens: int) -> dict[str, Any]:
        [answer] = ji.generate(self._model, [tokens], max_new_tokens=new_tokens)
        return {"tokens": list(answer.token_ids)}

    def host_overhead(self, tokens: list[int]) -> dict[str, Any]:
        return {"host_overhead_us": round(1e6 * host_overhead_s(self._model, tokens), 1)}


def _hello() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "device": device.device_kind,
        "platform": device.platform,
        "imports_peak_bytes": peak_bytes(),
    }


def _peak() -> dict[str, Any]:
    """Returns the most memory so far, on the host and, where the device counts it, on the device."""
    device = jax.devices()[0].memory_stats() or {}
    return {"peak_bytes": peak_bytes(), "device_peak_bytes": device.get("peak_bytes_in_use")}


def main() -> None:
    name_or_path, dtype, mode = sys.argv[1:]
    if mode != NATIVE:
        os.environ["PALLAS_KERNELS_NATIVE"] = "off"
    elif attention_implementations()["native"] is not None:
        sys.exit(f"native kernels: {attention_implementations()['native']}")
    jax.config.update("jax_enable_compilation_cache", False)  # what is compiled here is counted and timed
    ledger = CompileLedger()
    hello = _hello()
    worker = JaxinferWorker(name_or_path, dtype)
    operations = {
        name: getattr(worker, name)
        for name in ("prefill", "decode_begin", "decode", "decode_end", "generate", "host_overhead")
    }
    machine = {"peak": _peak, "compiles": ledger.record, "limits": machine_limits}
    serve(hello | worker.facts(), operations | machine)


if __name__ == "__main__":
    main()
