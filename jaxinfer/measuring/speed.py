"""How long a model's prefill and decode take, through the loops that `generate` itself runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.generation import generate, kv_dtype
from jaxinfer.generation.buckets import bucketed_capacity
from jaxinfer.generation.decode import MAX_STEPS, DecodeRun, decode_steps, first_token
from jaxinfer.generation.prefill import prefill
from jaxinfer.models import Model
from jaxinfer.state import DecodeState, init_state, truncate


def time_prefill(model: Model, tokens: Sequence[int], runs: int = 1) -> tuple[float, int]:
    """Returns (mean seconds from a prompt and an empty state to the logits after it, the greedy token)."""
    states = jax.block_until_ready([_empty_state(model, len(tokens)) for _ in range(runs)])
    began = time.perf_counter()
    for state in states:
        logits, _ = prefill(model.params, [tokens], state, config=model.config, donate=True)
        logits.block_until_ready()
    seconds = (time.perf_counter() - began) / runs
    return seconds, int(np.asarray(logits)[0].argmax())


class DecodeClock:
    """Rows in the middle of decoding: times the same steps again and again.

    Args:
      tokens: the prompt of every row; read once and repeated.
      steps: the most that will be timed at once, at most `MAX_STEPS`; the state has room for them.
    """

    def __init__(self, model: Model, tokens: Sequence[int], *, batch: int, steps: int):
        if not 1 <= steps <= MAX_STEPS:
            raise ValueError(f"DecodeClock(steps=...) must be in 1..{MAX_STEPS}; got {steps}")
        self._model, self._start = model, len(tokens)
        state = _empty_state(model, len(tokens) + steps)
        logits, state = prefill(model.params, [tokens], state, config=model.config, donate=True)
        if batch > 1:  # every leaf has the batch first
            logits, state = jax.tree.map(lambda leaf: jnp.repeat(leaf, batch, axis=0), (logits, state))
        self._run: DecodeRun
        self._run, _ = first_token(
            logits,
            state,
            np.full(batch, np.iinfo(np.int32).max, np.int32),
            np.array([-1], np.int32),
            None,
            None,
            num_top=0,
        )
        self._first = np.asarray(self._run.token)  # the token that follows the prompt, int32 [B]

    def time(self, steps: int) -> tuple[float, list[int]]:
        """Returns (seconds that `steps` greedy tokens a row take, row 0's); goes back to the prompt after."""
        model = self._model
        began = time.perf_counter()
        run, block = decode_steps(model.params, self._run, np.int32(steps), config=model.config, num_top=0)
        jax.block_until_ready((run, block))
        seconds = time.perf_counter() - began
        state = truncate(run.state, self._start)
        self._run = run.replace(state=state, token=jnp.asarray(self._first))
        return seconds, np.asarray(block.tokens)[0, :steps].tolist()


def host_overhead_s(model: Model, tokens: Sequence[int], repeats: int = 2) -> float:
    """Returns the seconds of this thread's own CPU time that `generate` takes a token of one row.

    The difference of two lengths, so that the prompt does not count. While the device computes this thread
    sleeps; where jax computes in the calling thread, that counts too.
    """

    def own_s(new_tokens: int) -> float:
        began = time.thread_time()
        generate(model, [tokens], max_new_tokens=new_tokens)
        return time.thread_time() - began

    few, many = 1 + MAX_STEPS, 1 + 2 * MAX_STEPS
    own_s(many)  # compiles
    return statistics.median((own_s(many) - own_s(few)) / (many - few) for _ in range(repeats))


def _empty_state(model: Model, positions: int) -> DecodeState:
    config = model.config
    return init_state(
        config,
        capacity=bucketed_capacity(positions, config.max_positions),
        dtype=kv_dtype(config),
        kv_window=model.kv_window,
    )
