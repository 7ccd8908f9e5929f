"""Top-k and top-p without a sort of the vocabulary.

Both keep a prefix of a row's tokens in the order (logit descending, id ascending), so the last token kept
says it all. The first candidates are sorted; where they do not hold the answer (a top-k beyond them, or a
flat distribution under top-p), the last value kept is built bit by bit, 32 passes over the row. Both ways
give the same token, since masses are exact.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jaxinfer.sampling.blocks import first_true, sort_key
from jaxinfer.sampling.mass import (
    Mass,
    MassTable,
    fraction_of,
    mass_of_count,
    running_mass,
    total_mass,
)

CANDIDATES = 128
# A mass within this share of top_p has reached it: probabilities of 0.1 in float32 make top_p = 0.3 keep
# three of ten equal tokens, as they do on paper, not four.
SLACK = 2.0**-20


@flax.struct.dataclass
class Prefix:
    """A row's tokens up to and including the last one kept."""

    key: jax.Array  # uint32 [B], `sort_key` of the last token's logit; 0 keeps everything
    token: jax.Array  # int32 [B], the last token's id

    def keeps(self, keys: jax.Array) -> jax.Array:
        """Returns bool [B, V] from `sort_key` of the row's logits [B, V]."""
        ids = jnp.arange(keys.shape[-1], dtype=jnp.int32)
        last = self.key[:, None]
        return (keys > last) | ((keys == last) & (ids <= self.token[:, None]))


def whole_rows(batch: int, vocab_size: int) -> Prefix:
    """Returns prefixes that keep every token."""
    return Prefix(jnp.zeros(batch, jnp.uint32), jnp.full(batch, vocab_size, jnp.int32))


def kept_prefix(logits: jax.Array, weights: jax.Array, top_k: jax.Array, top_p: jax.Array) -> Prefix:
    """Returns what top-k, then top-p on what remains, keep of each row.

    Args:
        logits: float32 [B, V], the order; not NaN.
        weights: float32 [B, V] in [0, 1], each token's probability up to a factor; 1 for the likeliest.
        top_k: int32 [B], 0 off.
        top_p: float32 [B] in (0, 1], 1 off.
    """
    vocab_size = logits.shape[-1]
    size = min(CANDIDATES, vocab_size)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab_size), vocab_size)
    few, nucleus = k <= size, top_p < 1
    values, ids = jax.lax.top_k(jnp.where(logits == 0, 0.0, logits), size)
    ends = running_mass(jnp.take_along_axis(weights, ids, axis=-1))
    whole, of_few = total_mass(weights), ends.take(jnp.minimum(k, size) - 1)
    remaining = Mass(jnp.where(few, of_few.high, whole.high), jnp.where(few, of_few.low, whole.low))
    reached = first_true(ends > _short_of_nucleus(remaining, top_p)[:, None])
    count = jnp.minimum(jnp.where(few, k, vocab_size), jnp.where(nucleus, reached + 1, vocab_size))
    solved = (few | (k == vocab_size)) & (~nucleus | (reached < size))
    last = (jnp.minimum(count, size) - 1)[:, None]
    cut = solved & (count <= size)
    everything = whole_rows(*logits.shape)
    sorted_prefix = Prefix(
        jnp.where(cut, sort_key(jnp.take_along_axis(values, last, -1)[:, 0]), everything.key),
        jnp.where(cut, jnp.take_along_axis(ids, last, -1)[:, 0], everything.token),
    )

    def search() -> Prefix:
        return _choose(solved, sorted_prefix, _searched_prefix(sort_key(logits), weights, k, top_p))

    return jax.lax.cond(jnp.all(solved), lambda: sorted_prefix, search)


def _searched_prefix(keys: jax.Array, weights: jax.Array, k: jax.Array, top_p: jax.Array) -> Prefix:
    by_count = jax.lax.cond(
        jnp.any(k < keys.shape[-1]),
        lambda: _search(keys, jnp.ones_like(weights), mass_of_count(k - 1)),
        lambda: whole_rows(*keys.shape),
    )
    remaining = jnp.where(by_count.keeps(keys), weights, 0.0)
    by_mass = jax.lax.cond(
        jnp.any(top_p < 1),
        lambda: _search(keys, remaining, _short_of_nucleus(total_mass(remaining), top_p)),
        lambda: by_count,
    )
    return _choose(top_p < 1, by_mass, by_count)


def _search(keys: jax.Array, weights: jax.Array, mass: Mass) -> Prefix:
    """Returns the shortest prefix that weighs more than `mass` [B], which is below the row's total."""

    def fix_bit(step: jax.typing.ArrayLike, key: jax.Array) -> jax.Array:
        higher = key | (jnp.uint32(1 << 31) >> jnp.asarray(step, jnp.uint32))
        enough = total_mass(jnp.where(keys >= higher[:, None], weights, 0.0)) > mass
        return jnp.where(enough, higher, key)

    # The largest key such that the tokens at it and above weigh enough; it is some token's.
    key = jax.lax.fori_loop(0, 32, fix_bit, jnp.zeros(keys.shape[:1], jnp.uint32))
    above = total_mass(jnp.where(keys > key[:, None], weights, 0.0))
    ties = MassTable.of(jnp.where(keys == key[:, None], weights, 0.0))
    return Prefix(key, ties.locate(mass - above))


def _short_of_nucleus(mass: Mass, top_p: jax.Array) -> Mass:
    """Returns the largest mass that is not yet a nucleus: top_p of `mass`, less the slack and one unit."""
    # Float32 rounds this to 2**-24 of a row's mass, a sixteenth of the slack.
    share = jnp.maximum((top_p - SLACK) * jnp.float32(2.0**32), 0.0).astype(jnp.uint32)
    target = fraction_of(mass, Mass(share, jnp.zeros_like(share)))
    one = ((target.high | target.low) != 0).astype(jnp.uint32)
    return target - Mass(jnp.zeros_like(one), one)


def _choose(condition: jax.Array, a: Prefix, b: Prefix) -> Prefix:
    return Prefix(jnp.where(condition, a.key, b.key), jnp.where(condition, a.token, b.token))
