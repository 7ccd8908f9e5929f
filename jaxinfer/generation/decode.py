"""Many decode steps in one device call: feed a token, sample the next, stop row by row."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.config import ModelConfig
from jaxinfer.generation.ledger import count_trace
from jaxinfer.models import DecoderParams, StepInputs, forward
from jaxinfer.sampling import RowSampling, SampleResult, mark_seen, sample, top_logprobs
from jaxinfer.state import DecodeState

MAX_STEPS = 64  # of one device call


@flax.struct.dataclass
class DecodeRun:
    """Rows in the middle of being generated.

    Attributes:
      state: everything before `token`.
      token: sampled last and not yet fed to the state, int32 [B].
      count: tokens sampled so far, int32 [B].
      finished: rows that are done; their state stands still, bool [B].
      limit: the most tokens to sample, int32 [B].
      eos: ids that end a row, int32 [E]; -1 where there are fewer.
      rows: how each row samples; None where every row takes the argmax.
      seen: tokens of prompt and answer, bool [B, V]; None where no row has a repetition penalty.
    """

    state: DecodeState
    token: jax.Array
    count: jax.Array
    finished: jax.Array
    limit: jax.Array
    eos: jax.Array
    rows: RowSampling | None
    seen: jax.Array | None


class TokenBlock(NamedTuple):
    """Tokens sampled in one device call; `valid` [B, S] says which are real.

    tokens int32 [B, S]; logprobs, processed_logprobs float32 [B, S]; top_ids int32 and top_logprobs float32
    [B, S, k], with k = 0 where none were asked for.
    """

    tokens: jax.Array
    valid: jax.Array
    logprobs: jax.Array
    processed_logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


@functools.partial(jax.jit, static_argnames=("num_top",), donate_argnames=("state", "seen"))
def first_token(
    logits: jax.Array,
    state: DecodeState,
    limit: jax.Array,
    eos: jax.Array,
    rows: RowSampling | None,
    seen: jax.Array | None,
    *,
    num_top: int,
) -> tuple[DecodeRun, TokenBlock]:
    """Returns the run that begins with a token sampled from a prompt's logits [B, V], and that token."""
    count_trace("first_token")
    batch = logits.shape[0]
    run = DecodeRun(
        state=state,
        token=jnp.zeros(batch, jnp.int32),
        count=jnp.zeros(batch, jnp.int32),
        finished=limit < 1,
        limit=limit,
        eos=eos,
        rows=rows,
        seen=seen,
    )
    block = _empty_block(batch, 1, num_top)
    return _sample_next(run, logits, block, 0)


@functools.partial(jax.jit, static_argnames=("config", "num_top"), donate_argnames=("run",))
def decode_steps(
    params: DecoderParams, run: DecodeRun, num_steps: jax.Array, *, config: ModelConfig, num_top: int
) -> tuple[DecodeRun, TokenBlock]:
    """Returns the run after up to `num_steps` more tokens a row, and the tokens, [B, MAX_STEPS].

    Stops early when every row is finished. `num_steps` is data: one program serves any count up to
    MAX_STEPS. `run` is donated.
    """
    count_trace("decode")

    def more(carry: tuple[jax.Array, DecodeRun, TokenBlock]) -> jax.Array:
        index, run, _ = carry
        return (index < jnp.minimum(num_steps, MAX_STEPS)) & ~jnp.all(run.finished)

    def one(carry: tuple[jax.Array, DecodeRun, TokenBlock]) -> tuple[jax.Array, DecodeRun, TokenBlock]:
        index, run, block = carry
        lengths = jnp.where(run.finished, 0, 1)
        logits, state = forward(
            params, run.token[:, None], run.state, config=config, inputs=StepInputs(lengths=lengths)
        )
        run, block = _sample_next(dataclasses.replace(run, state=state), logits, block, index)
        return index + 1, run, block

    block = _empty_block(run.token.shape[0], MAX_STEPS, num_top)
    _, run, block = lax.while_loop(more, one, (jnp.int32(0), run, block))
    return run, block


def _sample_next(
    run: DecodeRun, logits: jax.Array, block: TokenBlock, index: jax.Array | int
) -> tuple[DecodeRun, TokenBlock]:
    """Samples one token for every row that is not finished and writes it to column `index` of `block`."""
    drawn: SampleResult = sample(logits, run.rows, index=run.count, seen=run.seen)
    active = ~run.finished
    token = jnp.where(active, drawn.token, run.token)
    count = run.count + active
    # A token of -1 stands for logits that were not numbers: the row cannot go on.
    ended = jnp.any(token[:, None] == run.eos, axis=1) | (token < 0) | (count >= run.limit)
    seen = None if run.seen is None else mark_seen(run.seen, token[:, None], active[:, None])
    num_top = block.top_ids.shape[2]
    columns = [token, active, drawn.logprob, drawn.processed_logprob]
    columns += top_logprobs(logits, num_top) if num_top else [block.top_ids[:, 0], block.top_logprobs[:, 0]]
    block = TokenBlock(
        *(
            lax.dynamic_update_index_in_dim(array, column.astype(array.dtype), index, 1)
            for array, column in zip(block, columns, strict=True)
        )
    )
    run = dataclasses.replace(run, token=token, count=count, finished=run.finished | ended, seen=seen)
    return run, block


def _empty_block(batch: int, steps: int, num_top: int) -> TokenBlock:
    def array(dtype: np.dtype | type, *shape: int) -> jax.Array:
        return jnp.zeros((batch, steps, *shape), dtype)

    return TokenBlock(
        tokens=array(jnp.int32),
        valid=array(jnp.bool_),
        logprobs=array(jnp.float32),
        processed_logprobs=array(jnp.float32),
        top_ids=array(jnp.int32, num_top),
        top_logprobs=array(jnp.float32, num_top),
    )
