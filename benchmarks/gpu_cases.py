"""The kernels that are compiled for a GPU that is not there: ours, and jax's own of the same shape."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.span_attention import span_attention

PEER = "jax"  # what the names of other people's kernels begin with
Built = tuple[Callable, list[jax.ShapeDtypeStruct]]
BATCH, LENGTH, NUM_Q_HEADS, NUM_KV_HEADS = 1, 8192, 16, 4


def _array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def span_prefill(head_dim: int, *, sinks: bool = False, soft_cap: float | None = None, odd: int = 0) -> Built:
    """Span attention with as many queries as rows, `odd` more of each than whole blocks hold."""
    length = LENGTH + odd
    rows = _array(BATCH, NUM_KV_HEADS, length, head_dim)
    spans = _array(BATCH, length, dtype=jnp.int32)
    shapes = [_array(BATCH, length, NUM_Q_HEADS, head_dim), rows, rows, spans, spans]
    if sinks:
        shapes.append(_array(NUM_Q_HEADS, dtype=jnp.float32))

    def attend(query, key, value, lo, hi, sinks=None):
        return span_attention(
            query,
            key,
            value,
            lo,
            hi,
            softmax_scale=head_dim**-0.5,
            logits_soft_cap=soft_cap,
            sinks=sinks,
            implementation="pallas_gpu",
        )

    return attend, shapes


def span_decode(head_dim: int) -> Built:
    """One query a row over a cache of 8,192 rows, 8 query heads a key head."""
    rows = _array(8, 2, LENGTH, head_dim)
    spans = _array(8, 1, dtype=jnp.int32)

    def attend(*arrays):
        return span_attention(*arrays, softmax_scale=head_dim**-0.5, implementation="pallas_gpu")

    return attend, [_array(8, 1, 16, head_dim), rows, rows, spans, spans]


def span_paged(head_dim: int, page_rows: int) -> Built:
    """64 columns of 16 sequences over pages, 8 query heads a key head."""
    from pallas_kernels.span_attention.gpu_decode import paged_attention_gpu
    from pallas_kernels.span_attention.gpu_tile import TileMath

    pages = _array(1024, 2, page_rows, head_dim)
    numbers = _array(64, dtype=jnp.int32)
    tables = _array(16, LENGTH // page_rows, dtype=jnp.int32)
    attend = functools.partial(paged_attention_gpu, TileMath(head_dim**-0.5, None))
    return attend, [_array(64, 16, head_dim), pages, pages, tables, numbers, numbers, numbers]


def jax_attention(head_dim: int, *, causal: bool) -> Built:
    """jax's own Mosaic GPU attention, the causal or the full form."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=128 if head_dim <= 128 else 64, max_concurrent_steps=2, causal=causal
    )
    # Its buffers are float16; bfloat16 makes the same instructions.
    rows = _array(BATCH, LENGTH, NUM_KV_HEADS, head_dim, dtype=jnp.float16)
    shapes = [_array(BATCH, LENGTH, NUM_Q_HEADS, head_dim, dtype=jnp.float16), rows, rows]
    return functools.partial(attention_mgpu.attention, config=config), shapes


CASES: dict[str, Callable[[], Built]] = {
    **{f"span prefill, d{d}": functools.partial(span_prefill, d) for d in (64, 128, 256)},
    "span prefill, d64, lengths of no whole block": functools.partial(span_prefill, 64, odd=13),
    "span prefill, d80": functools.partial(span_prefill, 80),
    "span prefill, d128, sinks": functools.partial(span_prefill, 128, sinks=True),
    **{
        f"span prefill, d{d}, soft cap and sinks": functools.partial(
            span_prefill, d, sinks=True, soft_cap=50.0
        )
        for d in (64, 256)
    },
    **{f"span decode, d{d}": functools.partial(span_decode, d) for d in (64, 128, 256)},
    "span paged, d64, pages of 16": functools.partial(span_paged, 64, 16),
    "span paged, d128, pages of 128": functools.partial(span_paged, 128, 128),
    "span paged, d256, pages of 64": functools.partial(span_paged, 256, 64),
    **{
        f"jax {'causal' if causal else 'full'}, d{d}": functools.partial(jax_attention, d, causal=causal)
        for d in (64, 128, 256)
        for causal in (True, False)
    },
}
