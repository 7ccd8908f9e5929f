"""Rotary tables against plain numpy: scaling by layer kind, three axes, partial rotation."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import RopeConfig
from jaxinfer.ops import apply_rope, rope_tables
from jaxinfer.testing import tiny_config


def plain_angles(theta: float, rotary_dim: int, position: float) -> np.ndarray:
    """Radians of every pair of dims, float64 [rotary_dim / 2]."""
    return position * theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)


def assert_tables(tables, angles: np.ndarray) -> None:
    cos, sin = (np.asarray(table) for table in tables)
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-6)


def test_fault_21_gemma_scales_full_layers_by_8_and_local_layers_not_at_all():
    config = tiny_config("gemma3")
    local, full = config.layers[0].rope, config.layers[2].rope
    eight = jnp.array([[8]], jnp.int32)
    assert_tables(rope_tables(full, eight), plain_angles(1e6, full.rotary_dim, 1)[None, None])
    assert_tables(rope_tables(local, eight), plain_angles(1e4, local.rotary_dim, 8)[None, None])


def test_fault_22_each_frequency_turns_with_the_axis_that_it_belongs_to():
    rope = RopeConfig(5e6, 16, mrope_section=(4, 2, 2))
    # Two images of four columns between text, as time, height and width.
    time = [0, 1, 2, 3, 3, 3, 3, 5, 6, 7, 7, 7, 7, 9]
    height = [0, 1, 2, 3, 3, 4, 4, 5, 6, 7, 7, 8, 8, 9]
    width = [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 8, 7, 8, 9]
    axis = [0, 1, 2, 0, 1, 2, 0, 0]  # interleaved for as long as the shorter sections last
    positions = np.array([time, height, width], np.int32)
    angles = np.stack([positions[axis[pair]] * plain_angles(5e6, 16, 1)[pair] for pair in range(8)], axis=-1)
    assert_tables(rope_tables(rope, jnp.asarray(positions)[:, None]), angles[None])


def test_equal_axes_are_one_axis():
    rope = RopeConfig(5e6, 16, mrope_section=(4, 2, 2))
    positions = jnp.array([[0, 3, 70], [5, 6, 7]], jnp.int32)
    one = rope_tables(rope, positions)
    three = rope_tables(rope, jnp.broadcast_to(positions, (3, 2, 3)))
    for got, wanted in zip(three, one, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("rotary_dim", [4, 16])
def test_a_rotation_turns_pairs_half_a_rotary_dim_apart_and_leaves_the_rest(rotary_dim):
    rope = RopeConfig(1e4, rotary_dim)
    positions = np.array([[0, 5, 300]], np.int32)
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 16)).astype(np.float32)
    got = np.asarray(apply_rope(jnp.asarray(x), rope_tables(rope, jnp.asarray(positions))))
    half = rotary_dim // 2
    for column, position in enumerate(positions[0]):
        turn = np.exp(1j * plain_angles(1e4, rotary_dim, position))
        wanted = (x[0, column, :, :half] + 1j * x[0, column, :, half:rotary_dim]) * turn
        np.testing.assert_allclose(got[0, column, :, :half], wanted.real, atol=1e-5)
        np.testing.assert_allclose(got[0, column, :, half:rotary_dim], wanted.imag, atol=1e-5)
    np.testing.assert_array_equal(got[..., rotary_dim:], x[..., rotary_dim:])
