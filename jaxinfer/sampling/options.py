"""Sampling options: of one row as checked plain numbers, of a batch as arrays.

Options of a batch are arrays with one entry a row, so that a new value never recompiles.
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

_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


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

    Values are kept as float32. A mass within 1e-6 of `top_p` has reached it, and so for `min_p`: where
    ten tokens are equal, `top_p` 0.3 keeps three.

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

    @property
    def is_argmax(self) -> bool:
        """True where each token is the likeliest one of the unmodified logits."""
        return self.temperature == 0 and self.repetition_penalty in (None, 1)

    def __post_init__(self) -> None:
        temperature = _real(self, "temperature")
        if temperature != 0 and not _LEAST <= temperature <= _MOST:
            _refuse(self, "temperature", "0 (greedy) or a positive finite float32")
        if self.top_k is not None and not 1 <= _integer(self, "top_k") < 2**31:
            _refuse(self, "top_k", "None (off) or at least 1")
        if self.top_p is not None and not 0 < _real(self, "top_p") <= 1:
            _refuse(self, "top_p", "None (off) or in (0, 1]")
        if self.min_p is not None and not 0 <= _real(self, "min_p") <= 1:
            _refuse(self, "min_p", "None (off) or in [0, 1]")
        if self.repetition_penalty is not None:
            penalty = _real(self, "repetition_penalty")
            if not _LEAST <= penalty <= _MOST:
                _refuse(self, "repetition_penalty", "None (off) or a positive finite float32")
        if self.seed is not None and not 0 <= _integer(self, "seed") < 2**64:
            _refuse(self, "seed", "None (drawn from entropy) or in [0, 2**64)")


def _refuse(sampling: Sampling, field: str, expected: str) -> None:
    raise ValueError(f"Sampling({field}=...) must be {expected}; got {getattr(sampling, field)!r}")


def _real(sampling: Sampling, field: str) -> float:
    value = getattr(sampling, field)
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
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
