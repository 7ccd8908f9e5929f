"""A contender: this library, through the loops that `generate` itself runs."""

from __future__ import annotations

import collections
import sys
import time
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import jaxlib
import numpy as np

import jaxinfer as ji
from benchmarks.worker import peak_bytes, serve
from jaxinfer.generation import kv_dtype, traces
from jaxinfer.generation.buckets import bucketed_capacity
from jaxinfer.generation.decode import MAX_STEPS, DecodeRun, decode_steps, first_token
from jaxinfer.generation.prefill import prefill
from jaxinfer.sampling import stack_sampling
from jaxinfer.state import DecodeState

_STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_s",
    "/jax/core/compile/backend_compile_duration": "compile_s",
}


class CompileLedger:
    """Counts what jax compiles in this process, and how long each stage takes."""

    def __init__(self) -> None:
        self._programs = 0
        self._seconds = collections.Counter(dict.fromkeys(_STAGES.values(), 0.0))
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, duration_s: float, **unused: Any) -> None:
        if stage := _STAGES.get(event):
            self._seconds[stage] += duration_s
            self._programs += stage == "compile_s"

    def record(self) -> dict[str, Any]:
        """Returns the programs compiled, the seconds by stage, and the library's own traces by function."""
        seconds = {stage: round(value, 3) for stage, value in self._seconds.items()}
        return {"programs": self._programs, **seconds, "traces": traces()}


class JaxinferWorker:
    """One model and, from `decode_begin` to `decode_end`, one batch in the middle of decoding."""

    def __init__(self, name_or_path: str, dtype: str):
        began = time.perf_counter()
        self._model = ji.load(name_or_path, dtype=dtype)
        jax.block_until_ready(self._model.params)
        self.load_s = time.perf_counter() - began
        self._run: DecodeRun | None = None
        self._start = 0
        self._first: np.ndarray | None = None  # the token that follows the prompt, int32 [B]

    def facts(self) -> dict[str, Any]:
        config = self._model.config
        return {
            "load_s": self.load_s,
            "vocab_size": config.vocab_size,
            "max_positions": config.max_positions,
            "kv_dtype": kv_dtype(config),
        }

    def prefill(self, tokens: list[int], runs: int) -> dict[str, Any]:
        """Returns the mean seconds from a prompt and an empty state to the logits after it."""
        params, config = self._model.params, self._model.config
        states = jax.block_until_ready([self._empty_state(len(tokens)) for _ in range(runs)])
        began = time.perf_counter()
        for state in states:
            logits, _ = prefill(params, [tokens], state, config=config, donate=True)
            logits.block_until_ready()
        seconds = (time.perf_counter() - began) / runs
        return {"seconds": seconds, "tokens": [int(np.asarray(logits)[0].argmax())]}

    def decode_begin(self, tokens: list[int], batch: int, steps: int) -> dict[str, Any]:
        """Takes `batch` rows of the same prompt, with room for `steps` more tokens."""
        if not 1 <= steps <= MAX_STEPS:
            raise ValueError(f"decode_begin(steps=...) must be in 1..{MAX_STEPS}; got {steps}")
        model = self._model
        state = self._empty_state(len(tokens) + steps)
        logits, state = prefill(model.params, [tokens], state, config=model.config, donate=True)
        if batch > 1:  # the prompt is read once: every leaf has the batch first
            logits, state = jax.tree.map(lambda leaf: jnp.repeat(leaf, batch, axis=0), (logits, state))
        run, _ = first_token(
            logits,
            state,
            jnp.full(batch, np.iinfo(np.int32).max, jnp.int32),
            jnp.int32([-1]),
            stack_sampling([ji.Sampling()] * batch),
            None,
            num_top=0,
        )
        self._start, self._first, self._run = len(tokens), np.asarray(run.token), run
        return {}

    def decode(self, steps: int) -> dict[str, Any]:
        """Returns the seconds that `steps` tokens a row take, and row 0's; goes back to the prompt after."""
        if self._run is None:
            raise ValueError("decode() needs decode_begin()")
        model = self._model
        began = time.perf_counter()
        run, block = decode_steps(model.params, self._run, np.int32(steps), config=model.config, num_top=0)
        jax.block_until_ready((run, block))
        seconds = time.perf_counter() - began
        state = ji.truncate(run.state, self._start)
        self._run = run.replace(state=state, token=jnp.asarray(self._first))
        return {"seconds": seconds, "tokens": np.asarray(block.tokens)[0, :steps].tolist()}

    def decode_end(self) -> dict[str, Any]:
        self._run = None
        return {}

    def generate(self, tokens: list[int], new_tokens: int) -> dict[str, Any]:
        [answer] = ji.generate(self._model, [tokens], max_new_tokens=new_tokens)
        return {"tokens": list(answer.token_ids)}

    def _empty_state(self, positions: int) -> DecodeState:
        config = self._model.config
        return ji.init_state(
            config,
            capacity=bucketed_capacity(positions, config.max_positions),
            dtype=kv_dtype(config),
            kv_window=self._model.kv_window,
        )


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
    name_or_path, dtype = sys.argv[1:]
    jax.config.update("jax_enable_compilation_cache", False)  # what is compiled here is counted and timed
    ledger = CompileLedger()
    hello = _hello()
    worker = JaxinferWorker(name_or_path, dtype)
    operations = {
        name: getattr(worker, name)
        for name in ("prefill", "decode_begin", "decode", "decode_end", "generate")
    }
    serve(hello | worker.facts(), operations | {"peak": _peak, "compiles": ledger.record})


if __name__ == "__main__":
    main()
