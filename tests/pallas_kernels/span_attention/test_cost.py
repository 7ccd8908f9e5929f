"""What span attention costs: blocks visited, and memory. Counted, not timed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.span_attention import span_attention, xla

BLOCK = 64
TILING = xla.Tiling(BLOCK, BLOCK, jnp.dtype(jnp.float32), sequential=True)


@pytest.fixture
def visits(monkeypatch):
    """How many blocks took which path while it was patched in: {"read", "masked", "whole"}."""
    counts = {"read": 0, "masked": 0, "whole": 0}

    def count(kind):
        counts[kind] += 1

    def counted(function, kind_of):
        @functools.wraps(function)
        def call(*args):
            jax.debug.callback(functools.partial(count, kind_of(args)))
            return function(*args)

        return call

    monkeypatch.setattr(xla, "_read_blocks", counted(xla._read_blocks, lambda args: "read"))
    kind_of = lambda args: "whole" if args[-1] is None else "masked"  # noqa: E731
    monkeypatch.setattr(xla, "_add_block", counted(xla._add_block, kind_of))
    return counts


def attend(lo, hi, kv_len):
    draw = np.random.default_rng(0)
    arrays = (draw.normal(size=(1, len(lo), 2, 16)), *draw.normal(size=(2, 1, 1, kv_len, 16)))
    spans = (jnp.asarray(x, jnp.int32)[None] for x in (lo, hi))
    out = xla.span_attention_xla(
        *(jnp.asarray(x, jnp.float32) for x in arrays), *spans, softmax_scale=0.25, tiling=TILING
    )
    jax.block_until_ready(out)
    jax.effects_barrier()


def test_causal_attention_visits_the_lower_triangle_and_masks_its_diagonal_alone(visits):
    rows = np.arange(8 * BLOCK)
    attend(np.zeros_like(rows), rows, kv_len=16 * BLOCK)
    assert visits == {"read": 36, "masked": 8, "whole": 28}


def test_a_window_visits_what_it_touches_however_long_the_cache(visits):
    rows = 9 * BLOCK + np.arange(4 * BLOCK)
    attend(rows - 2 * BLOCK + 1, rows, kv_len=40 * BLOCK)
    assert visits == {"read": 12, "masked": 8, "whole": 4}


def test_blocks_in_a_gap_between_spans_are_not_computed(visits):
    hi = np.where(np.arange(BLOCK) % 2, 10, 20 * BLOCK + 10)
    attend(hi - 5, hi, kv_len=30 * BLOCK)
    assert visits["masked"] == 2
    assert visits["whole"] == 0


def test_empty_spans_visit_nothing(visits):
    attend(np.ones(2 * BLOCK), np.zeros(2 * BLOCK), kv_len=8 * BLOCK)
    assert visits == {"read": 0, "masked": 0, "whole": 0}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_no_array_of_query_by_key_length_exists(backward):
    q_len = kv_len = 4096
    num_heads, head_dim = 4, 64

    def run(query, key, value, lo, hi):
        return jnp.sum(span_attention(query, key, value, lo, hi, softmax_scale=0.125, implementation="xla"))

    function = jax.grad(run, argnums=(0, 1, 2)) if backward else run
    shapes = [
        jax.ShapeDtypeStruct((1, q_len, num_heads, head_dim), jnp.float32),
        *[jax.ShapeDtypeStruct((1, num_heads, kv_len, head_dim), jnp.float32)] * 2,
        *[jax.ShapeDtypeStruct((1, q_len), jnp.int32)] * 2,
    ]
    temporary_bytes = jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    array_bytes = q_len * num_heads * head_dim * 4
    assert 0 < temporary_bytes < 8 * array_bytes  # a T x S array of one head alone has 16 of these
