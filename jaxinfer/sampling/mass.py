"""Exact masses: sums of token weights in [0, 1], as 64-bit integers.

A sum of floats depends on the order that a compiler picks, which changes with the batch size; a sum of
integers does not, and CPUs vectorise it. Weights stay float32; a sum counts each in units of 2**-40, cut
off below. Taking a weight apart is exact arithmetic, so it may be done wherever a compiler fuses it. JAX
has no 64-bit integers by default, so a mass is a pair of 32-bit words.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxinfer.sampling.blocks import BLOCK, block_at, first_true, reduce_blocks

_PART = 20  # bits of each of the two parts of a weight: those of a block sum to at most 2**30


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

    def __getitem__(self, index: Any) -> Mass:
        return Mass(self.high[index], self.low[index])

    def take(self, position: jax.Array) -> Mass:
        """Returns the entries of the last axis at `position` int32 [...]."""
        index = position[..., None]
        return Mass(
            jnp.take_along_axis(self.high, index, axis=-1)[..., 0],
            jnp.take_along_axis(self.low, index, axis=-1)[..., 0],
        )

    def where(self, mask: jax.Array) -> Mass:
        """Returns the mass where `mask` bool [...], else 0."""
        return Mass(jnp.where(mask, self.high, 0), jnp.where(mask, self.low, 0))

    def as_float(self) -> jax.Array:
        """Returns the mass as float32, in ones rather than units."""
        return self.high.astype(jnp.float32) * 2.0**-8 + self.low.astype(jnp.float32) * 2.0**-40


def mass_of_count(count: jax.Array) -> Mass:
    """Returns the mass of `count` int32 [...] weights of 1."""
    high = count.astype(jnp.uint32) << (2 * _PART - 32)
    return Mass(high, jnp.zeros_like(high))


def running_mass(weights: jax.Array) -> Mass:
    """Returns the inclusive cumulative mass [..., n] of at most 1024 weights, float32 [..., n]."""
    high, low = _parts(weights)
    return _compose(jnp.cumsum(high, axis=-1, dtype=jnp.int32), jnp.cumsum(low, axis=-1, dtype=jnp.int32))


def total_mass(weights: jax.Array) -> Mass:
    """Returns the mass [B] of weights float32 [B, V]."""
    blocks = _block_masses(weights)
    zero = jnp.zeros((), jnp.uint32)

    def add(a: tuple, b: tuple) -> tuple:
        total = Mass(*a) + Mass(*b)
        return total.high, total.low

    return Mass(*jax.lax.reduce((blocks.high, blocks.low), (zero, zero), add, (1,)))


@flax.struct.dataclass
class MassTable:
    """Weights with the cumulative mass of their blocks, to look ids up by mass."""

    weights: jax.Array  # float32 [B, V]
    ends: Mass  # [B, blocks]; up to the end of each block

    @classmethod
    def of(cls, weights: jax.Array) -> MassTable:
        """Returns the table of weights float32 [B, V]."""
        return cls(weights, jax.lax.associative_scan(Mass.__add__, _block_masses(weights), axis=-1))

    def total(self) -> Mass:
        """Returns the mass [B] of each row."""
        return Mass(self.ends.high[:, -1], self.ends.low[:, -1])

    def locate(self, mass: Mass) -> jax.Array:
        """Returns int32 [B], the lowest id up to which a row sums to more than `mass` [B]."""
        block = first_true(self.ends > mass[:, None])
        start = self.ends.take(jnp.maximum(block - 1, 0)).where(block > 0)
        inside = running_mass(block_at(self.weights, block, fill=0.0))
        return block * BLOCK + first_true(inside > (mass - start)[:, None])


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


def _digits(mass: Mass) -> tuple[jax.Array, ...]:
    return mass.low & 0xFFFF, mass.low >> 16, mass.high & 0xFFFF, mass.high >> 16


def _parts(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns int32 (high, low), low below 2**20: a weight is high * 2**20 + low units."""
    scaled = weights * jnp.float32(2**_PART)
    high = scaled.astype(jnp.int32)
    return high, ((scaled - high.astype(jnp.float32)) * jnp.float32(2**_PART)).astype(jnp.int32)


def _compose(high: jax.Array, low: jax.Array) -> Mass:
    """Returns high * 2**20 + low, from sums of parts."""
    high, low = high.astype(jnp.uint32), low.astype(jnp.uint32)
    return Mass(high >> (32 - _PART), high << _PART) + Mass(jnp.zeros_like(low), low)


def _block_masses(weights: jax.Array) -> Mass:
    add = functools.partial(jnp.sum, dtype=jnp.int32)
    return _compose(*(reduce_blocks(part, add) for part in _parts(weights)))
