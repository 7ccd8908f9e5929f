"""One token a row: penalty, temperature, top-k, top-p, min-p, then one draw from what is left."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jaxinfer.sampling.filters import SLACK, kept_tokens
from jaxinfer.sampling.logprobs import token_logprobs
from jaxinfer.sampling.options import RowSampling


@flax.struct.dataclass
class SampleResult:
    """One token a row. A row that cannot be sampled has token -1 and NaN twice."""

    token: jax.Array  # int32 [B]
    logprob: jax.Array  # float32 [B]; log-softmax of the unmodified logits at token
    processed_logprob: jax.Array  # float32 [B]; under the distribution drawn from; 0 for a greedy row


@jax.jit
def sample(
    logits: jax.Array, rows: RowSampling | None, *, index: jax.Array, seen: jax.Array | None = None
) -> SampleResult:
    """Returns one token a row; where every row is greedy it costs an argmax.

    Equal logits count in the order of their ids. Under `vmap` the shortcuts (no row draws, no row filters)
    are lost.

    A row that cannot be sampled has token -1 and NaN log-probabilities, whatever its options: one with
    a NaN or +inf logit or with no finite logit, before or after the penalty (the logits of a row whose
    state has gone bad are NaN), and one that asks for a repetition penalty while `seen` is None.

    Args:
        logits: float32 [B, V].
        rows: the options, from `stack_sampling`; None where every row is the argmax of `logits`, whatever was
            seen: then nothing else is compiled.
        index: int32 [B], how many tokens the row has generated so far; folded into its key.
        seen: bool [B, V], the tokens that the repetition penalty applies to, from `mark_seen`.

    Raises:
        ValueError: a wrong dtype or shape.
    """
    _check(logits, rows, index, seen)
    penalised = logits if rows is None else _penalise(logits, rows.repetition_penalty, seen)
    best = jnp.max(penalised, axis=-1)
    # A CPU's vectorised maximum may pass over a NaN.
    well = jnp.isfinite(best) & ~jnp.any(jnp.isnan(penalised), axis=-1)
    token, processed = greedy = _first(penalised == best[:, None]), jnp.zeros_like(best)
    if rows is not None:
        if seen is None:
            well &= rows.repetition_penalty == 1
        drawing = well & (rows.temperature > 0)
        drawn = jax.lax.cond(
            jnp.any(drawing),
            lambda: _draw(penalised - best[:, None], rows, index, drawing),
            lambda: greedy,
        )
        token, processed = (jnp.where(drawing, *pair) for pair in zip(drawn, greedy, strict=True))
    raw = token_logprobs(logits, jnp.where(well, token, 0))
    return SampleResult(
        token=jnp.where(well, token, -1),
        logprob=jnp.where(well, raw, jnp.nan),
        processed_logprob=jnp.where(well, processed, jnp.nan),
    )


def _draw(
    centred: jax.Array, rows: RowSampling, index: jax.Array, drawing: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns token int32 [B] and its log-probability float32 [B]; meaningless where not `drawing`.

    The largest of logit plus Gumbel noise is a draw from the softmax (Gumbel, 1954); it needs no cumulative
    sum, and so gives the same token whatever the batch.

    Args:
      centred: float32 [B, V], logits less the row's best.
    """
    vocab_size = centred.shape[-1]
    scaled = centred / jnp.where(drawing, rows.temperature, 1.0)[:, None]
    top_k = jnp.where(drawing & (rows.top_k < vocab_size), rows.top_k, 0)
    top_p = jnp.where(drawing, rows.top_p, 1.0)
    kept = jax.lax.cond(
        jnp.any((top_k > 0) | (top_p < 1)),
        lambda: kept_tokens(scaled, top_k, top_p),
        lambda: jnp.ones_like(scaled, bool),
    )
    kept &= (
        scaled >= jnp.log(rows.min_p * (1 - SLACK))[:, None]
    )  # the best token's is 0; log(0) keeps everything
    remaining = jnp.where(kept, scaled, -jnp.inf)
    noisy = remaining + _noise(rows.rng_key, index, vocab_size)
    token = _first(noisy == jnp.max(noisy, axis=-1, keepdims=True))
    return token, token_logprobs(remaining, token)


def _first(mask: jax.Array) -> jax.Array:
    """Returns int32 [B], the lowest true position of bool [B, V]; an argmax costs a CPU ten times as much."""
    size = mask.shape[-1]
    return jnp.min(jnp.where(mask, jnp.arange(size, dtype=jnp.int32), size), axis=-1)


def _noise(rng_key: jax.Array, index: jax.Array, vocab_size: int) -> jax.Array:
    """Returns Gumbel noise float32 [B, V], each row a function of its key and index alone."""

    def row(key_data: jax.Array, count: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data, impl="threefry2x32"), count)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(row)(rng_key, index)


def _penalise(logits: jax.Array, penalty: jax.Array, seen: jax.Array | None) -> jax.Array:
    if seen is None:
        return logits
    penalty = penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def mark_seen(seen: jax.Array, tokens: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns `seen` with the valid tokens marked; updated in place inside a jitted loop.

    Args:
        seen: bool [B, V].
        tokens: int32 [B, T]; an id outside [0, V) marks nothing.
        valid: bool [B, T]; False for padding, which marks nothing whatever its id.
    """
    size = seen.shape[-1]
    inside = valid & (tokens >= 0) & (tokens < size)
    batch = jnp.arange(seen.shape[0])[:, None]
    return seen.at[batch, jnp.where(inside, tokens, size)].set(True, mode="drop")


def _check(logits: jax.Array, rows: RowSampling | None, index: jax.Array, seen: jax.Array | None) -> None:
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"sample(logits=...) must be float32 [B, V]; got {logits.dtype} {logits.shape}")
    batch = logits.shape[0]
    if rows is not None and rows.temperature.shape != (batch,):
        raise ValueError(
            f"sample(rows=...) must have one entry for each of {batch} rows; got {rows.temperature.shape}"
        )
    if index.shape != (batch,) or index.dtype != jnp.int32:
        raise ValueError(f"sample(index=...) must be int32 [{batch}]; got {index.dtype} {index.shape}")
    if seen is not None and (seen.shape != logits.shape or seen.dtype != jnp.bool_):
        raise ValueError(f"sample(seen=...) must be bool {logits.shape}; got {seen.dtype} {seen.shape}")
