"""Exact masses: non-negative token weights in fixed point, summed as 64-bit integers.

A sum of floats depends on the order that a compiler picks, which changes with the batch size; a sum of
integers does not, and CPUs vectorise it. A weight in [0, 1] is `high * 2**20 + low` units of 2**-40, cut
off below. JAX has no 64-bit integers by default, so a mass is a pair of 32-bit words.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

UNITS_LOG2 = 40
_HALF = 20  # bits of one of a weight's two parts
BLOCK = 1024  # weights that are summed in 32 bits: 2**20 * BLOCK < 2**32


@flax.struct.dataclass
class Weights:
    """Weights of tokens; `Weights(0, 1)` is one unit."""

    high: jax.Array  # uint32 [..., V], at most 2**20
    low: jax.Array  # uint32 [..., V], below 2**20

    def where(self, mask: jax.Array) -> Weights:
        """Returns the weights where `mask` bool [..., V], else 0."""
        return Weights(jnp.where(mask, self.high, 0), jnp.where(mask, self.low, 0))

    def take(self, ids: jax.Array) -> Weights:
        """Returns the weights of `ids` int32 [..., k]."""
        return Weights(
            jnp.take_along_axis(self.high, ids, axis=-1), jnp.take_along_axis(self.low, ids, axis=-1)
        )


@flax.struct.dataclass
class Mass:
    """An unsigned 64-bit integer in units of 2**-40: `high * 2**32 + low`."""

    high: jax.Array  # uint32 [...]
    low: jax.Array  # uint32 [...]

    def __add__(self, other: Mass) -> Mass:
        low = self.low + other.low
        return Mass(self.high + other.high + (low < other.low).astype(jnp.uint32), low)

    def __sub__(self, other: Mass) -> Mass:
        borrow = (self.low < other.low).astype(jnp.uint32)
        return Mass(self.high - other.high - borrow, self.low - other.low)

    def __gt__(self, other: Mass) -> jax.Array:
        return (self.high > other.high) | ((self.high == other.high) & (self.low > other.low))

    def __getitem__(self, index) -> Mass:
        return Mass(self.high[index], self.low[index])

    def at(self, position: jax.Array) -> Mass:
        """Returns the entries of the last axis at `position` int32 [...]."""
        index = position[..., None]
        return Mass(
            jnp.take_along_axis(self.high, index, axis=-1)[..., 0],
            jnp.take_along_axis(self.low, index, axis=-1)[..., 0],
        )

    def as_float(self) -> jax.Array:
        """Returns the mass as float32, in ones rather than units."""
        words = self.high.astype(jnp.float32) * 2.0**32 + self.low.astype(jnp.float32)
        return words * jnp.float32(2.0**-UNITS_LOG2)


def unit_mass(units: jax.Array) -> Mass:
    """Returns a mass of that many units, from int32 or uint32 [...]."""
    low = units.astype(jnp.uint32)
    return Mass(jnp.zeros_like(low), low)


def fixed_point(weight: jax.Array) -> Weights:
    """Returns float32 [..., V] in [0, 1] as weights; no step but the last cut rounds."""
    scaled = weight * jnp.float32(2**_HALF)
    high = jnp.floor(scaled)
    low = jnp.floor((scaled - high) * jnp.float32(2**_HALF))
    return Weights(high.astype(jnp.uint32), low.astype(jnp.uint32))


def running_mass(weights: Weights) -> Mass:
    """Returns the inclusive cumulative mass [..., n] of at most `BLOCK` weights."""
    return _compose(
        jnp.cumsum(weights.high, axis=-1, dtype=jnp.uint32),
        jnp.cumsum(weights.low, axis=-1, dtype=jnp.uint32),
    )


def total_mass(weights: Weights) -> Mass:
    """Returns the mass [B] of weights [B, V]."""
    blocks = _block_masses(_in_blocks(weights))
    zero = jnp.zeros((), jnp.uint32)

    def add(a: tuple, b: tuple) -> tuple:
        total = Mass(*a) + Mass(*b)
        return total.high, total.low

    return Mass(*jax.lax.reduce((blocks.high, blocks.low), (zero, zero), add, (blocks.high.ndim - 1,)))


def locate(weights: Weights, mass: Mass) -> jax.Array:
    """Returns int32 [B], the lowest id up to which the weights [B, V] sum to more than `mass` [B].

    `mass` must be below the row's total.
    """
    parts = _in_blocks(weights)
    blocks = _block_masses(parts)
    ends = jax.lax.associative_scan(Mass.__add__, blocks, axis=-1)
    block = first_true(ends > mass[..., None])
    before = ends.at(block) - blocks.at(block)
    index = block[..., None, None]
    inside = Weights(
        jnp.take_along_axis(parts.high, index, axis=-2)[..., 0, :],
        jnp.take_along_axis(parts.low, index, axis=-2)[..., 0, :],
    )
    return block * BLOCK + first_true(running_mass(inside) > (mass - before)[..., None])


def fraction_of(mass: Mass, fraction: Mass) -> Mass:
    """Returns floor(mass * fraction / 2**64): `fraction` counts units of 2**-64."""
    columns = [jnp.zeros_like(mass.low)] * 8  # of 16 bits each, before carrying
    for i, a in enumerate(_digits(mass)):
        for j, b in enumerate(_digits(fraction)):
            product = a * b
            columns[i + j] += product & 0xFFFF
            columns[i + j + 1] += product >> 16
    carry = jnp.zeros_like(mass.low)
    digits = []
    for column in columns:
        carry += column
        digits.append(carry & 0xFFFF)
        carry >>= 16
    return Mass((digits[7] << 16) | digits[6], (digits[5] << 16) | digits[4])


def first_true(mask: jax.Array) -> jax.Array:
    """Returns int32 [...], the lowest true position of the last axis; its size when there is none."""
    size = mask.shape[-1]
    return jnp.min(jnp.where(mask, jnp.arange(size, dtype=jnp.int32), size), axis=-1)


def _digits(mass: Mass) -> tuple[jax.Array, ...]:
    return mass.low & 0xFFFF, mass.low >> 16, mass.high & 0xFFFF, mass.high >> 16


def _compose(high: jax.Array, low: jax.Array) -> Mass:
    """Returns high * 2**20 + low."""
    return Mass(high >> (32 - _HALF), high << _HALF) + unit_mass(low)


def _in_blocks(weights: Weights) -> Weights:
    def split(part: jax.Array) -> jax.Array:
        spare = -part.shape[-1] % BLOCK
        padded = jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, spare)])
        return padded.reshape(*part.shape[:-1], -1, BLOCK)

    return Weights(split(weights.high), split(weights.low))


def _block_masses(parts: Weights) -> Mass:
    return _compose(
        jnp.sum(parts.high, axis=-1, dtype=jnp.uint32), jnp.sum(parts.low, axis=-1, dtype=jnp.uint32)
    )
