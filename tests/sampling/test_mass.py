import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.sampling.blocks import greatest
from jaxinfer.sampling.mass import Mass, MassTable, fraction_of, mass_of_count, running_mass, total_mass
from tests.sampling.rows import KINDS, random_logits

SIZES = [1, 31, 1023, 1024, 1025, 5000]
words = st.integers(0, 2**64 - 1)


def to_mass(*numbers: int) -> Mass:
    return Mass(
        jnp.asarray([n >> 32 for n in numbers], jnp.uint32),
        jnp.asarray([n & 0xFFFFFFFF for n in numbers], jnp.uint32),
    )


def to_ints(mass: Mass) -> list[int]:
    high, low = np.asarray(mass.high).ravel(), np.asarray(mass.low).ravel()
    return [(int(h) << 32) | int(w) for h, w in zip(high, low, strict=True)]


def random_weights(seed: int, size: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    weights = rng.random((3, size)) * 2.0 ** rng.integers(-45, 1, (3, size))
    return np.where(rng.random((3, size)) < 0.1, rng.integers(0, 2, (3, size)), weights).astype(np.float32)


def units(weights: np.ndarray) -> np.ndarray:
    return np.floor(weights.astype(np.float64) * 2.0**40).astype(np.int64)


@settings(deadline=None)
@given(a=words, b=words)
def test_masses_compute_as_64_bit_integers(a, b):
    left, right = to_mass(a), to_mass(b)
    assert to_ints(left + right) == [(a + b) % 2**64]
    assert to_ints(left - right) == [(a - b) % 2**64]
    assert (left > right).tolist() == [a > b]
    assert to_ints(fraction_of(left, right)) == [a * b >> 64]
    np.testing.assert_allclose(left.as_float(), [a / 2**40], rtol=3e-7)


@pytest.mark.parametrize("size", SIZES)
def test_a_total_is_the_exact_sum_of_the_weights_in_units(size):
    weights = random_weights(size, size)
    assert to_ints(jax.jit(total_mass)(weights)) == units(weights).sum(-1).tolist()
    assert to_ints(MassTable.of(jnp.asarray(weights)).total()) == units(weights).sum(-1).tolist()


def test_a_row_of_ones_does_not_overflow():
    ones = jnp.ones((1, 300_000), jnp.float32)
    assert to_ints(total_mass(ones)) == [300_000 << 40] == to_ints(mass_of_count(jnp.asarray([300_000])))


def test_running_masses_are_exact():
    weights = random_weights(0, 1024)
    assert to_ints(running_mass(jnp.asarray(weights))) == np.cumsum(units(weights), -1).ravel().tolist()


@pytest.mark.parametrize("size", SIZES)
def test_the_located_id_is_the_first_whose_cumulative_mass_is_greater(size):
    weights = random_weights(size + 1, size)
    weights[:, -1] = 1.0
    cumulative = np.cumsum(units(weights), -1)
    table = jax.jit(MassTable.of)(weights)
    locate = jax.jit(lambda t, high, low: t.locate(Mass(high, low)))
    rng = np.random.default_rng(size)
    for step in range(20):
        # Every other mass sits on the edge of some id.
        masses = [
            int(rng.integers(0, row[-1])) if step % 2 else int(rng.choice(row[:-1], 1)[0]) if size > 1 else 0
            for row in cumulative
        ]
        asked = to_mass(*masses)
        expected = [np.searchsorted(row, m, side="right") for row, m in zip(cumulative, masses, strict=True)]
        assert locate(table, asked.high, asked.low).tolist() == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_greatest_is_numpys_argmax(kind, size):
    logits = np.stack([random_logits(kind, seed, size) for seed in range(3)])
    best, ids = jax.jit(greatest)(logits)
    np.testing.assert_array_equal(best, logits.max(-1))
    np.testing.assert_array_equal(ids, logits.argmax(-1))


@pytest.mark.parametrize("size", SIZES)
def test_one_nan_makes_the_greatest_nan(size):
    logits = np.zeros((3, size), np.float32)
    logits[1, size // 2] = np.nan
    assert np.isnan(jax.jit(greatest)(logits)[0]).tolist() == [False, True, False]
