"""Prompts into a state: chunked, bucketed, each row as long as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.generation.buckets import MAX_CHUNK, plan_prefill_buckets
from jaxinfer.generation.ledger import count_trace
from jaxinfer.models import DecoderParams, LogitsMode, StepInputs, forward, forward_with_aux
from jaxinfer.sampling import token_logprobs
from jaxinfer.state import Checkpoint, DecodeState


def prefill(
    params: DecoderParams,
    token_rows: Sequence[Sequence[int]],
    state: DecodeState,
    *,
    config: ModelConfig,
    donate: bool,
    max_chunk: int = MAX_CHUNK,
) -> tuple[jax.Array, DecodeState]:
    """Returns (logits float32 [B, V] after each row's last token, the state after all rows).

    Args:
      token_rows: B rows of token ids, any lengths; a row without tokens changes nothing and has zero
        logits. The caller has checked ids and capacity.
      state: of B rows.
      donate: give up `state`'s buffers; it must not be used afterwards. Otherwise it stays valid, at the
        cost of one copy.
    """
    logits = jnp.zeros((len(token_rows), config.vocab_size), jnp.float32)
    chunks = prefill_chunks(params, token_rows, state, config=config, donate=donate, max_chunk=max_chunk)
    for logits, state, _ in chunks:  # noqa: B007
        pass
    return logits, state


def prefill_chunks(
    params: DecoderParams,
    token_rows: Sequence[Sequence[int]],
    state: DecodeState,
    *,
    config: ModelConfig,
    donate: bool,
    max_chunk: int = MAX_CHUNK,
    checkpoint_at: Sequence[int] = (),
) -> Iterator[tuple[jax.Array, DecodeState, tuple[Checkpoint, ...]]]:
    """Yields (logits so far, state so far, checkpoints taken in it) after every chunk; see `prefill`.

    Args:
      checkpoint_at: absolute lengths to take checkpoints at, the same for every row.
    """
    step = _step_donating if donate else _step_keeping
    lengths = np.array([len(row) for row in token_rows], np.int32)
    logits = jnp.zeros((len(token_rows), config.vocab_size), jnp.float32)
    first = int(np.asarray(state.length)[0]) if checkpoint_at else 0
    start = 0
    for size in plan_prefill_buckets(int(lengths.max(initial=0)), max_chunk):
        tokens, chunk_lengths = _chunk(token_rows, lengths, start, size)
        here = [at for at in checkpoint_at if first + start < at <= first + start + size]
        at = np.broadcast_to(np.array(here, np.int32), (len(token_rows), len(here))) if here else None
        ends_here = bool(((lengths > start) & (lengths <= start + size)).any())
        logits, state, checkpoints = step(
            params,
            tokens,
            state,
            logits,
            chunk_lengths,
            at,
            config=config,
            mode="last" if ends_here else "none",
        )
        start += size
        step = _step_donating
        yield logits, state, checkpoints


def score_prompts(
    params: DecoderParams, token_rows: Sequence[Sequence[int]], state: DecodeState, *, config: ModelConfig
) -> list[list[float]]:
    """Returns, for each row, the raw log-probability of each token after the first, given those before it.

    `state` is empty and stays valid; logits of every column are needed, so chunks are small.
    """
    lengths = np.array([len(row) for row in token_rows], np.int32)
    following = [row[1:] for row in token_rows]
    step, start, chunks = _scoring_step_keeping, 0, []
    for size in plan_prefill_buckets(int(lengths.max(initial=0)), 128):
        tokens, chunk_lengths = _chunk(token_rows, lengths, start, size)
        targets, _ = _chunk(following, lengths - 1, start, size)
        values, state = step(params, tokens, targets, state, chunk_lengths, config=config)
        chunks.append(values)
        step, start = _scoring_step_donating, start + size
    found = np.concatenate(jax.device_get(chunks), axis=1) if chunks else np.zeros((len(lengths), 0))
    return [given[: max(0, length - 1)].tolist() for given, length in zip(found, lengths, strict=True)]


def _chunk(
    token_rows: Sequence[Sequence[int]], lengths: np.ndarray, start: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.zeros((len(token_rows), size), np.int32)
    chunk_lengths = np.clip(lengths - start, 0, size).astype(np.int32)
    for row, count in enumerate(chunk_lengths):
        tokens[row, :count] = token_rows[row][start : start + count]
    return tokens, chunk_lengths


def _step(
    params: DecoderParams,
    tokens: jax.Array,
    state: DecodeState,
    logits: jax.Array,
    lengths: jax.Array,
    checkpoint_at: jax.Array | None,
    *,
    config: ModelConfig,
    mode: LogitsMode,
) -> tuple[jax.Array, DecodeState, tuple[Checkpoint, ...]]:
    count_trace("prefill")
    inputs = StepInputs(lengths=lengths, checkpoint_at=checkpoint_at)
    new, state, aux = forward_with_aux(params, tokens, state, config=config, inputs=inputs, logits=mode)
    logits = logits if new is None else jnp.where(lengths[:, None] > 0, new, logits)
    return logits, state, aux.checkpoints


_STATIC = ("config", "mode")
_step_keeping = jax.jit(_step, static_argnames=_STATIC)
_step_donating = jax.jit(_step, static_argnames=_STATIC, donate_argnames=("state",))


def _scoring_step(
    params: DecoderParams,
    tokens: jax.Array,
    targets: jax.Array,
    state: DecodeState,
    lengths: jax.Array,
    *,
    config: ModelConfig,
) -> tuple[jax.Array, DecodeState]:
    count_trace("score_prompt")
    logits, state = forward(
        params, tokens, state, config=config, inputs=StepInputs(lengths=lengths), logits="all"
    )
    return token_logprobs(logits, targets), state


_scoring_step_keeping = jax.jit(_scoring_step, static_argnames=("config",))
_scoring_step_donating = jax.jit(_scoring_step, static_argnames=("config",), donate_argnames=("state",))
