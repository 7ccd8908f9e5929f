"""Top-k and top-p: which tokens remain.

Both keep the first tokens of a row in the order (logit descending, id ascending), so the last one kept says
it all. A short sorted list of candidates nearly always holds it; where it does not (a top-k beyond it, or a
flat distribution under top-p) the last value kept is built bit by bit, 32 passes over the row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_CANDIDATES = 256
# A mass within this share of top_p has reached it, a probability within it of min_p too: ten equal tokens in
# float32 make top_p = 0.3 keep three of them, as they do on paper, not four.
SLACK = 1e-6


def kept_tokens(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Returns which tokens top-k, then top-p on what remains, keep: bool [B, V].

    Args:
      scaled: float32 [B, V], logits over temperature less the row's best; not NaN.
      top_k: int32 [B], at most V; 0 off.
      top_p: float32 [B] in (0, 1]; 1 off.
    """
    vocab_size = scaled.shape[-1]
    scaled = jnp.where(scaled == 0, 0.0, scaled)  # -0 equals 0, but sorts and as bits lies below it
    limit = jnp.where(top_k > 0, top_k, vocab_size)
    filtered = (limit < vocab_size) | (top_p < 1)
    kept, found = _among_candidates(scaled, limit, top_p)
    kept = jax.lax.cond(
        jnp.all(found | ~filtered),
        lambda: kept,
        lambda: jnp.where(found[:, None], kept, _by_search(scaled, limit, top_p)),
    )
    return kept | ~filtered[:, None]


def _among_candidates(scaled: jax.Array, limit: jax.Array, top_p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (tokens kept, bool [B, V]; whether the last of them is a candidate, bool [B])."""
    vocab_size = scaled.shape[-1]
    size = min(_CANDIDATES, vocab_size)
    values, ids = jax.lax.top_k(scaled, size)  # of equal values the lower id comes first
    ends = jnp.cumsum(jnp.exp(values), axis=-1)
    of_top_k = jnp.take_along_axis(ends, (jnp.minimum(limit, size) - 1)[:, None], axis=-1)[:, 0]
    mass = jnp.where(limit < vocab_size, of_top_k, jnp.sum(jnp.exp(scaled), axis=-1))
    wanted = jnp.where(top_p < 1, (top_p - SLACK) * mass, jnp.inf)
    # A token stays while those before it have not reached the wanted mass.
    count = jnp.minimum(1 + jnp.sum(ends < wanted[:, None], axis=-1), limit)
    found = (count <= size) & ((limit <= size) | (limit == vocab_size))
    last = jnp.minimum(count, size)[:, None] - 1
    last_value = jnp.take_along_axis(values, last, axis=-1)
    last_id = jnp.take_along_axis(ids, last, axis=-1)
    tied = (scaled == last_value) & (jnp.arange(vocab_size) <= last_id)
    return (scaled > last_value) | tied, found


def _by_search(scaled: jax.Array, limit: jax.Array, top_p: jax.Array) -> jax.Array:
    """Returns the tokens kept, bool [B, V], without sorting them: a CPU sorts 262,144 in 300 ms."""
    keys = _sort_key(scaled)
    kept = _shortest_prefix(keys, jnp.ones_like(scaled), limit.astype(jnp.float32))
    weights = jnp.where(kept, jnp.exp(scaled), 0.0)
    wanted = (top_p - SLACK) * jnp.sum(weights, axis=-1)
    return kept & (_shortest_prefix(keys, weights, wanted) | (top_p >= 1)[:, None])


def _shortest_prefix(keys: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """Returns the fewest first tokens that weigh at least `wanted` [B] together, bool [B, V]."""

    def fix_bit(step: jax.Array | int, key: jax.Array) -> jax.Array:
        higher = key | (jnp.uint32(1 << 31) >> jnp.asarray(step, jnp.uint32))
        enough = jnp.sum(jnp.where(keys >= higher[:, None], weights, 0.0), axis=-1) >= wanted
        return jnp.where(enough, higher, key)

    # The largest key such that the tokens at it and above weigh enough; then its ties, lowest ids first.
    key = jax.lax.fori_loop(0, 32, fix_bit, jnp.zeros(keys.shape[:1], jnp.uint32))[:, None]
    above, tied = keys > key, keys == key
    missing = wanted - jnp.sum(jnp.where(above, weights, 0.0), axis=-1)
    of_ties = jnp.where(tied, weights, 0.0)
    before = jnp.cumsum(of_ties, axis=-1) - of_ties
    return above | (tied & (before < missing[:, None]))


def _sort_key(values: jax.Array) -> jax.Array:
    """Returns uint32 in the order of float32 values, which hold no -0."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)
