"""From logits to tokens: sampling options, the draw, and log-probabilities.

Every function works on whole batches under `jit`, `vmap` and `scan`. Options are arrays with one entry
a row, so that a new value never recompiles. A draw depends on the row's seed and on how many tokens
that row has generated, never on its neighbours, its slot or the batch size.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import secrets
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

_FLOAT32 = np.finfo(np.float32)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one row's tokens are chosen. Applied in this order; None turns a step off.

    1. `repetition_penalty`: a logit of a token already seen is divided by it when positive and
       multiplied by it otherwise (Keskar et al., CTRL, arXiv:1909.05858, section 4.1).
    2. `temperature`: logits are divided by it; 0 is greedy, the argmax after the penalty.
    3. `top_k`: exactly k tokens stay, in order of (logit descending, id ascending).
    4. `top_p`: of these, renormalised, the shortest prefix in the same order whose mass reaches `top_p`
       (Holtzman et al., arXiv:1904.09751, section 3.1).
    5. `min_p`: of these, the tokens at least `min_p` times as likely as the likeliest (arXiv:2407.01082).

    `top_k` of 0 or -1 is refused, since others read it as "off" and as "last": None is off.
    `seed` None draws one from the operating system's entropy when rows are stacked.

    Raises:
        ValueError: a value outside its range, or one that float32 cannot hold.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        temperature = _real(self, "temperature")
        if temperature != 0 and not _FLOAT32.tiny <= temperature <= _FLOAT32.max:
            _refuse(self, "temperature", "0 (greedy) or a positive finite float32")
        if self.top_k is not None and not 1 <= _integer(self, "top_k") < 2**31:
            _refuse(self, "top_k", "None (off) or at least 1")
        if self.top_p is not None and not 0 < _real(self, "top_p") <= 1:
            _refuse(self, "top_p", "None (off) or in (0, 1]")
        if self.min_p is not None and not 0 <= _real(self, "min_p") <= 1:
            _refuse(self, "min_p", "None (off) or in [0, 1]")
        if self.repetition_penalty is not None:
            penalty = _real(self, "repetition_penalty")
            if not _FLOAT32.tiny <= penalty <= _FLOAT32.max:
                _refuse(self, "repetition_penalty", "None (off) or a positive finite float32")
        if self.seed is not None and not 0 <= _integer(self, "seed") < 2**64:
            _refuse(self, "seed", "None (drawn from entropy) or in [0, 2**64)")


def _refuse(sampling: Sampling, field: str, expected: str) -> None:
    raise ValueError(f"Sampling({field}=...) must be {expected}; got {getattr(sampling, field)!r}")


def _real(sampling: Sampling, field: str) -> float:
    value = getattr(sampling, field)
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        _refuse(sampling, field, "a number")
    return number


def _integer(sampling: Sampling, field: str) -> int:
    value = getattr(sampling, field)
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ValueError(f"Sampling({field}=...) must be None or an integer; got {value!r}")


@flax.struct.dataclass
class RowSampling:
    """Sampling options of a batch, one entry a row; build it with `stack_sampling`."""

    temperature: jax.Array  # float32 [B]; 0 greedy
    top_k: jax.Array  # int32 [B]; 0 off
    top_p: jax.Array  # float32 [B]; 1 off
    min_p: jax.Array  # float32 [B]; 0 off
    repetition_penalty: jax.Array  # float32 [B]; 1 off
    rng_key: jax.Array  # uint32 [B, 2]; threefry key data: the seed's high and low words


@flax.struct.dataclass
class SampleResult:
    """One token a row. For a row that cannot be sampled: token -1 and NaN twice."""

    token: jax.Array  # int32 [B]
    logprob: jax.Array  # float32 [B]; log-softmax of the unmodified logits at token
    processed_logprob: jax.Array  # float32 [B]; under the distribution drawn from; 0 for a greedy row


def stack_sampling(samplings: Sequence[Sampling]) -> RowSampling:
    """Returns the options of a batch, row b from `samplings[b]`."""
    seeds = [secrets.randbits(64) if s.seed is None else operator.index(s.seed) for s in samplings]

    def column(field: str, off: float, dtype: type) -> jax.Array:
        values = [getattr(s, field) for s in samplings]
        return jnp.asarray(np.array([off if v is None else v for v in values], dtype))

    return RowSampling(
        temperature=column("temperature", 0.0, np.float32),
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1.0, np.float32),
        min_p=column("min_p", 0.0, np.float32),
        repetition_penalty=column("repetition_penalty", 1.0, np.float32),
        rng_key=jnp.asarray(np.array([(s >> 32, s & 0xFFFFFFFF) for s in seeds], np.uint32).reshape(-1, 2)),
    )


@jax.jit
def sample(
    logits: jax.Array, rows: RowSampling, *, index: jax.Array, seen: jax.Array | None = None
) -> SampleResult:
    """Draws one token a row; a batch of greedy rows costs an argmax.

    A row that cannot be sampled has token -1 and NaN log-probabilities, whatever its options: one with
    a NaN or +inf logit or with no finite logit, before or after the penalty (the logits of a row whose
    state has gone bad are NaN), and one that asks for a repetition penalty while `seen` is None.

    Args:
        logits: float32 [B, V].
        rows: the options, from `stack_sampling`.
        index: int32 [B], how many tokens the row has generated so far; folded into its key.
        seen: bool [B, V], the tokens that the repetition penalty applies to, from `mark_seen`.
    """
    penalised = _penalise(logits, rows.repetition_penalty, seen)
    best = jnp.max(penalised, axis=-1)  # NaN when any logit is
    greedy = _first(penalised == best[:, None])
    well = jnp.isfinite(best)
    if seen is None:
        well &= rows.repetition_penalty == 1
    drawing = well & (rows.temperature > 0)
    drawn, processed = jax.lax.cond(
        jnp.any(drawing),
        lambda: _draw(penalised, best, rows, index),
        lambda: (greedy, jnp.zeros_like(best)),
    )
    token = jnp.where(drawing, drawn, greedy)
    raw = token_logprobs(logits, jnp.where(well, token, 0))
    return SampleResult(
        token=jnp.where(well, token, -1),
        logprob=jnp.where(well, raw, jnp.nan),
        processed_logprob=jnp.where(well, jnp.where(drawing, processed, 0.0), jnp.nan),
    )


def _penalise(logits: jax.Array, penalty: jax.Array, seen: jax.Array | None) -> jax.Array:
    if seen is None:
        return logits
    penalty = penalty[:, None]
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def _first(mask: jax.Array) -> jax.Array:
    """Returns the lowest true position of the last axis, 0 when there is none."""
    size = mask.shape[-1]
    position = jnp.arange(size, dtype=jnp.int32)
    return jnp.min(jnp.where(mask, position, size), axis=-1) % size


def _draw(
    penalised: jax.Array, best: jax.Array, rows: RowSampling, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    weights = jnp.exp((penalised - best[:, None]) / temperature[:, None])
    k = jnp.where(rows.top_k > 0, rows.top_k, weights.shape[-1])
    order = jnp.argsort(-penalised, axis=-1, stable=True)
    ranked = jnp.take_along_axis(weights, order, -1)
    ranked = jnp.where(jnp.arange(weights.shape[-1]) < k[:, None], ranked, 0.0)
    before = jnp.cumsum(ranked, -1) - ranked
    keep = (before < rows.top_p[:, None] * ranked.sum(-1, keepdims=True)) & (ranked > 0)
    ranked = jnp.where(keep, ranked, 0.0)
    weights = jnp.take_along_axis(ranked, jnp.argsort(order, axis=-1), -1)
    weights = jnp.where(weights >= rows.min_p[:, None], weights, 0.0)
    race = weights / _exponential(rows.rng_key, index, weights.shape[-1])
    token = _first(race == jnp.max(race, axis=-1, keepdims=True))
    chosen = jnp.take_along_axis(weights, token[:, None], axis=-1)[:, 0]
    return token, jnp.log(chosen / jnp.sum(weights, axis=-1))


def _exponential(rng_key: jax.Array, index: jax.Array, size: int) -> jax.Array:
    """Returns float32 [B, size] unit exponentials, a function of each row's key and index alone."""

    def row(key_data: jax.Array, count: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data, impl="threefry2x32"), count)
        bits = jax.random.bits(key, (size,), jnp.uint32)
        # Uniform in (0, 1), fine near 0: the smallest exponentials decide the race.
        uniform = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
        return -jnp.log1p(-jnp.minimum(uniform, jnp.float32(1 - 2.0**-24)))

    return jax.vmap(row)(rng_key, index)


def mark_seen(seen: jax.Array, tokens: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns `seen` with the valid tokens marked.

    Args:
        seen: bool [B, V].
        tokens: int32 [B, T]; an id outside [0, V) marks nothing.
        valid: bool [B, T]; False for padding, which marks nothing whatever its id.
    """
    size = seen.shape[-1]
    inside = valid & (tokens >= 0) & (tokens < size)
    batch = jnp.arange(seen.shape[0])[:, None]
    return seen.at[batch, jnp.where(inside, tokens, size)].set(True, mode="drop")


def token_logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns float32 [...], the log-softmax of `logits` [..., V] at `tokens` int32 [...]; at most 0."""
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return _log_softmax_at(logits, chosen[..., None])[..., 0]


def top_logprobs(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the k likeliest tokens of `logits` [..., V], likeliest first, ties by lowest id.

    Returns:
        ids int32 [..., k] and their log-softmax float32 [..., k].
    """
    values, ids = jax.lax.top_k(logits, k)
    return ids.astype(jnp.int32), _log_softmax_at(logits, values)


def _log_softmax_at(logits: jax.Array, chosen: jax.Array) -> jax.Array:
    # Both terms are at most 0 after rounding too: chosen <= best, and the sum holds exp(0) = 1.
    best = jnp.max(logits, axis=-1, keepdims=True)
    return (chosen - best) - jnp.log(jnp.sum(jnp.exp(logits - best), axis=-1, keepdims=True))
