"""Log-probabilities of unmodified logits: what the model said, before any sampling option."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token_logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the log-softmax of the logits at given tokens; at most 0 after rounding too.

    Args:
        logits: float32 [..., V].
        tokens: int32 [...].

    Returns:
        float32 [...]; NaN where the logits hold NaN or +inf, or nothing finite, or the id is not in [0, V).
    """
    # Out of range is NaN; a negative id would count from the end.
    ids = jnp.where(tokens < 0, logits.shape[-1], tokens)[..., None]
    chosen = jnp.take_along_axis(logits, ids, axis=-1, mode="fill", fill_value=jnp.nan)
    return _log_softmax_at(logits, chosen)[..., 0]


def top_logprobs(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the k likeliest tokens, likeliest first, ties by lowest id.

    Args:
        logits: float32 [..., V].
        k: static, in [1, V].

    Returns:
        ids int32 [..., k] and their log-softmax float32 [..., k], as `token_logprobs` gives it.

    Raises:
        ValueError: k outside [1, V].
    """
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"top_logprobs(k=...) must be in [1, V = {logits.shape[-1]}]; got {k}")
    values, ids = jax.lax.top_k(jnp.where(logits == 0, 0.0, logits), k)  # -0 and 0 tie
    return ids.astype(jnp.int32), _log_softmax_at(logits, values)


def _log_softmax_at(logits: jax.Array, chosen: jax.Array) -> jax.Array:
    # Two terms that are at most 0 each: chosen <= best, and the sum holds exp(0) = 1.
    best = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.sum(jnp.exp(logits - best), axis=-1, keepdims=True)
    return (chosen - best) - jnp.log(total)
