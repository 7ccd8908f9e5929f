"""Prompts into a state: chunked, bucketed, each row as long as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.generation.buckets import MAX_CHUNK, PrefillStep, plan_prefill_steps
from jaxinfer.generation.image_rows import ImageRow, StepImages
from jaxinfer.generation.ledger import count_trace
from jaxinfer.models import DecoderParams, LogitsMode, StepInputs, forward, forward_with_aux
from jaxinfer.sampling import token_logprobs
from jaxinfer.state import Checkpoint, DecodeState

_SCORING_CHUNK = 128


def prefill(
    params: DecoderParams,
    token_rows: Sequence[Sequence[int]],
    state: DecodeState,
    *,
    config: ModelConfig,
    donate: bool,
    max_chunk: int = MAX_CHUNK,
    images: Sequence[ImageRow | None] = (),
) -> tuple[jax.Array, DecodeState]:
    """Returns (logits float32 [B, V] after each row's last token, the state after all rows).

    Args:
      token_rows: B rows of token ids, any lengths; a row without tokens changes nothing and has zero
        logits. The caller has checked ids and capacity.
      state: of B rows.
      donate: give up `state`'s buffers; it must not be used afterwards. Otherwise it stays valid, at the
        cost of one copy.
      images: what stands behind each row's placeholders, None where it has none; () for text alone. Steps
        without an image column are those of text, compiled programs included.

    Raises:
      ImageRunTooLongError: an image run that a layer reads in both directions is longer than any step;
        nothing has been computed then.
    """
    logits = None
    chunks = prefill_chunks(
        params, token_rows, state, config=config, donate=donate, max_chunk=max_chunk, images=images
    )
    for logits, state, _ in chunks:  # noqa: B007
        pass
    if logits is None:  # no row has a token
        logits = jnp.zeros((len(token_rows), config.vocab_size), jnp.float32)
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
    images: Sequence[ImageRow | None] = (),
) -> Iterator[tuple[jax.Array, DecodeState, tuple[Checkpoint, ...]]]:
    """Yields (logits so far, state so far, checkpoints taken in it) after every chunk; see `prefill`.

    Args:
      checkpoint_at: absolute lengths to take checkpoints at, the same for every row.
    """
    run = _step_donating if donate else _step_keeping
    logits = jnp.zeros((len(token_rows), config.vocab_size), jnp.float32)
    first = np.asarray(state.length) if checkpoint_at else np.zeros(len(token_rows), np.int32)
    shown = StepImages.of(images, state, config)
    for step in _steps(token_rows, shown, max_chunk):
        begin, end = first + step.starts, first + step.starts + step.counts
        here = [at for at in checkpoint_at if ((begin < at) & (at <= end)).any()]
        at = np.broadcast_to(np.array(here, np.int32), (len(token_rows), len(here))) if here else None
        ends_here = any(
            count and start + count == len(row)
            for row, start, count in zip(token_rows, step.starts, step.counts, strict=True)
        )
        inputs = _inputs(step, shown, checkpoint_at=at)
        tokens = _columns(token_rows, step)
        mode = "last" if ends_here else "none"
        logits, state, checkpoints = run(params, tokens, state, logits, inputs, config=config, mode=mode)
        run = _step_donating
        yield logits, state, checkpoints


def score_prompts(
    params: DecoderParams,
    token_rows: Sequence[Sequence[int]],
    state: DecodeState,
    *,
    config: ModelConfig,
    images: Sequence[ImageRow | None] = (),
) -> list[list[float]]:
    """Returns, for each row, the raw log-probability of each token after the first, given those before it.

    `state` is empty and stays valid; logits of every column are needed, so chunks are small.
    """
    following = [[*row[1:], 0] for row in token_rows]  # what follows the last token is not scored
    shown = StepImages.of(images, state, config)
    run, steps, found = _scoring_step_keeping, _steps(token_rows, shown, _SCORING_CHUNK), []
    for step in steps:
        inputs = _inputs(step, shown)
        tokens, targets = _columns(token_rows, step), _columns(following, step)
        values, state = run(params, tokens, targets, state, inputs, config=config)
        found.append(values)
        run = _scoring_step_donating
    scores: list[list[float]] = [[] for _ in token_rows]
    for step, values in zip(steps, jax.device_get(found), strict=True):
        for row, count in enumerate(step.counts):
            scores[row] += values[row, :count].tolist()
    return [row_scores[:-1] for row_scores in scores]


def _steps(
    token_rows: Sequence[Sequence[int]], images: StepImages | None, max_chunk: int
) -> list[PrefillStep]:
    lengths = [len(row) for row in token_rows]
    return plan_prefill_steps(lengths, max_chunk, whole_runs=None if images is None else images.whole_runs)


def _inputs(step: PrefillStep, images: StepImages | None, **more: Any) -> StepInputs:
    if images is not None:
        more |= images.inputs(step.starts, step.counts, step.size)
    return StepInputs(lengths=step.counts, **more)  # pyright: ignore[reportArgumentType] - numpy, to jit


def _columns(token_rows: Sequence[Sequence[int]], step: PrefillStep) -> np.ndarray:
    """Returns a step's tokens, int32 [B, T], zeros where it is padding."""
    tokens = np.zeros((len(token_rows), step.size), np.int32)
    for row, (start, count) in enumerate(zip(step.starts, step.counts, strict=True)):
        tokens[row, :count] = token_rows[row][start : start + count]
    return tokens


def _step(
    params: DecoderParams,
    tokens: jax.Array,
    state: DecodeState,
    logits: jax.Array,
    inputs: StepInputs,
    *,
    config: ModelConfig,
    mode: LogitsMode,
) -> tuple[jax.Array, DecodeState, tuple[Checkpoint, ...]]:
    count_trace("prefill")
    new, state, aux = forward_with_aux(params, tokens, state, config=config, inputs=inputs, logits=mode)
    assert inputs.lengths is not None  # every step says them
    logits = logits if new is None else jnp.where(inputs.lengths[:, None] > 0, new, logits)
    return logits, state, aux.checkpoints


_STATIC = ("config", "mode")
_step_keeping = jax.jit(_step, static_argnames=_STATIC)
_step_donating = jax.jit(_step, static_argnames=_STATIC, donate_argnames=("state",))


def _scoring_step(
    params: DecoderParams,
    tokens: jax.Array,
    targets: jax.Array,
    state: DecodeState,
    inputs: StepInputs,
    *,
    config: ModelConfig,
) -> tuple[jax.Array, DecodeState]:
    count_trace("score_prompt")
    logits, state = forward(params, tokens, state, config=config, inputs=inputs, logits="all")
    return token_logprobs(logits, targets), state


_scoring_step_keeping = jax.jit(_scoring_step, static_argnames=("config",))
_scoring_step_donating = jax.jit(_scoring_step, static_argnames=("config",), donate_argnames=("state",))
