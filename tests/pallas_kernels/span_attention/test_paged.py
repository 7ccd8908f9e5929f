"""Every form of paged attention agrees with a float64 oracle over shuffled pages, garbage rows included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.span_attention import paged_span_attention
from pallas_kernels.span_attention.paged import paged_span_attention_reference, paged_span_attention_xla
from pallas_kernels.span_attention.tpu_paged import paged_span_attention_tpu
from tests.pallas_kernels.span_attention import oracles

PAGE, PAGES = 128, 3
FORMS = {
    "reference": paged_span_attention_reference,
    "xla": paged_span_attention_xla,
    "pallas_tpu": functools.partial(paged_span_attention_tpu, interpret=True),
}


def call(groups: int, has_sinks: bool):
    """Columns of three sequences, mixed, with padding and an empty span; unread rows hold garbage."""
    draw = np.random.default_rng(groups)
    num_columns, num_kv_heads, head_dim = 21, 2, 64
    tables = draw.permutation(PAGES * 4)[: PAGES * 3].reshape(3, PAGES).astype(np.int32)
    ids = draw.integers(-1, 3, num_columns).astype(np.int32)
    hi = draw.integers(0, PAGE * PAGES, num_columns).astype(np.int32)
    lo = np.maximum(hi - draw.integers(0, 250, num_columns), 0).astype(np.int32)
    hi[4] = lo[4] - 1
    query = draw.normal(size=(num_columns, num_kv_heads * groups, head_dim)).astype(np.float32)
    pages = draw.normal(size=(2, PAGES * 4, num_kv_heads, PAGE, head_dim)).astype(np.float32)
    read = np.zeros((PAGES * 4, PAGE), bool)
    for sequence, low, high in zip(ids, lo, hi, strict=True):
        for row in range(low, high + 1) if sequence >= 0 else ():
            read[tables[sequence, row // PAGE], row % PAGE] = True
    pages = np.where(read[None, :, None, :, None], pages, np.nan)
    sinks = draw.normal(size=num_kv_heads * groups).astype(np.float32) if has_sinks else None
    return query, pages[0], pages[1], tables, ids, lo, hi, sinks


def expected(query, keys, values, tables, ids, lo, hi, sinks, **options):
    out = np.zeros(query.shape)
    for column, sequence in enumerate(ids):
        if sequence >= 0:
            rows = [np.moveaxis(x[tables[sequence]], 1, 0) for x in (keys, values)]
            rows = [x.reshape(1, x.shape[0], -1, x.shape[3]) for x in rows]
            spans = [x[column].reshape(1, 1) for x in (lo, hi)]
            out[column] = oracles.span_attention(
                query[None, column : column + 1], *rows, *spans, sinks, **options
            )[0, 0]
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("groups", "cap"), [(1, None), (3, None), (8, 1.5)])
def test_every_form_agrees_with_the_oracle(form, groups, cap):
    *arrays, sinks = call(groups, has_sinks=cap is not None)
    options = {"softmax_scale": 0.125, "logits_soft_cap": cap}
    with jax.default_matmul_precision("highest"):
        found = jax.jit(functools.partial(FORMS[form], **options))(*map(jnp.asarray, arrays), sinks=sinks)
    want = expected(*arrays, sinks, **options)
    assert np.abs(np.asarray(found) - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(
    ("index", "name"),
    [
        (0, "query"),
        (1, "key_pages"),
        (2, "value_pages"),
        (3, "block_tables"),
        (4, "sequence_ids"),
        (5, "span_lo"),
        (6, "span_hi"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(index, name):
    arrays = [jnp.asarray(x) for x in call(1, has_sinks=False)[:7]]
    arrays[index] = arrays[index].astype(jnp.float16)
    with pytest.raises(ValueError, match=rf"paged_span_attention\({name}=\.\.\.\) must be .*got float16"):
        paged_span_attention(*arrays, softmax_scale=0.125)


def test_the_best_form_here_is_the_xla_form_and_a_named_kernel_is_refused_not_replaced():
    arrays = [jnp.asarray(x) for x in call(3, has_sinks=False)[:7]]
    found = paged_span_attention(*arrays, softmax_scale=0.125)
    np.testing.assert_array_equal(found, paged_span_attention_xla(*arrays, softmax_scale=0.125))
    with pytest.raises(NotImplementedError, match=r"pallas_tpu.*implementation=None"):
        paged_span_attention(*arrays, softmax_scale=0.125, implementation="pallas_tpu")
