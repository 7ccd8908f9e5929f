"""Every form of span attention agrees with a float64 oracle on every case, garbage rows included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.span_attention.cases import CASES, Case
from pallas_kernels.span_attention.reference import span_attention_reference
from pallas_kernels.span_attention.tpu import BlockSizes, span_attention_tpu
from pallas_kernels.span_attention.xla import Tiling, span_attention_xla
from tests.pallas_kernels.span_attention import oracles


def tiled(block_q: int, block_kv: int, *, sequential: bool):
    """The XLA form cut small, so that small cases cross many block edges."""

    def attend(query, key, *arrays, **options):
        tiling = Tiling(min(block_q, query.shape[1]), min(block_kv, key.shape[2]), query.dtype, sequential)
        return span_attention_xla(query, key, *arrays, tiling=tiling, **options)

    return attend


FORMS = {
    "reference": span_attention_reference,
    "xla": span_attention_xla,
    "xla in small tiles": tiled(24, 40, sequential=True),
    "xla in small tiles, rows together": tiled(24, 40, sequential=False),
    "pallas_tpu": functools.partial(span_attention_tpu, interpret=True),
    "pallas_tpu in small blocks": functools.partial(
        span_attention_tpu, blocks=BlockSizes(64, 128), interpret=True
    ),
}
# Where the small tiles add nothing: one head_dim and ratio of each kind is enough for them.
DISTINCT = [case for case in CASES if "query heads" not in case.name]
RUNS = [
    *((form, case) for form in ("reference", "xla", "pallas_tpu") for case in CASES),
    *((form, case) for form in FORMS if "small" in form for case in DISTINCT),
]
BFLOAT16 = [
    (form, case)
    for form in ("reference", "xla", "xla in small tiles, rows together", "pallas_tpu")
    for case in CASES
    if case.name
    in (
        "causal",
        "ragged rows",
        "decode",
        "decode a few columns",
        "sinks",
        "head_dim 80, 4 query heads a key head",
    )
]


@functools.cache
def expected(case: Case, dtype: str) -> np.ndarray:
    inputs = case.inputs()
    rounded = [np.asarray(x.astype(dtype)).astype(np.float64) for x in inputs[:3]]
    return oracles.span_attention(*rounded, *inputs[3:], **case.options)


def error(form: str, case: Case, dtype: str) -> float:
    """The largest difference, relative to the largest value (or to 1 where every value is zero)."""
    *arrays, sinks = case.inputs()
    arrays = [jnp.asarray(x, dtype if x.dtype == np.float32 else None) for x in arrays]
    with jax.default_matmul_precision("highest"):
        out = jax.jit(functools.partial(FORMS[form], **case.options))(*arrays, sinks=sinks)
    assert out.dtype == dtype
    want = expected(case, dtype)
    return np.abs(np.asarray(out, np.float64) - want).max() / (np.abs(want).max() or 1)


@pytest.mark.parametrize(("form", "case"), RUNS, ids=lambda x: x if isinstance(x, str) else x.name)
def test_float32_agrees_with_the_oracle(form, case):
    assert error(form, case, "float32") < 1e-5


@pytest.mark.parametrize(("form", "case"), BFLOAT16, ids=lambda x: x if isinstance(x, str) else x.name)
def test_bfloat16_agrees_with_the_oracle(form, case):
    assert error(form, case, "bfloat16") < 2e-2


@pytest.mark.parametrize("form", ["reference", "xla", "pallas_tpu"])
def test_a_query_without_rows_gives_zeros_and_not_small_numbers(form):
    case = next(case for case in CASES if case.name == "empty rows")
    *arrays, _ = case.inputs()
    out = FORMS[form](*map(jnp.asarray, arrays), **case.options)
    kv_len = arrays[1].shape[2]
    empty = np.minimum(arrays[4], kv_len - 1) < np.maximum(arrays[3], 0)
    assert empty.any()
    assert not np.asarray(out)[empty].any()
    assert np.asarray(out)[~empty].any(axis=(1, 2)).all()
