"""Span attention is differentiable whatever computes it, and garbage rows leave no trace in a gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.span_attention.cases import CASES, Case
from pallas_kernels.span_attention.reference import span_attention_reference
from pallas_kernels.span_attention.tpu import span_attention_tpu
from pallas_kernels.span_attention.xla import Tiling, span_attention_xla
from tests.pallas_kernels.span_attention import oracles

FORMS = {
    "reference": span_attention_reference,
    "xla": span_attention_xla,
    "xla in small tiles": functools.partial(
        span_attention_xla, tiling=Tiling(24, 40, jnp.dtype(jnp.float32), sequential=True)
    ),
    "pallas_tpu": functools.partial(span_attention_tpu, interpret=True),
}
BY_NAME = {case.name: case for case in CASES}
NAMES = ("image runs", "ragged rows", "soft cap and sinks", "sinks", "decode a few columns")
RUNS = [
    *((form, name) for form in ("reference", "xla") for name in NAMES),
    *(("xla in small tiles", name) for name in ("image runs", "soft cap and sinks")),
    ("pallas_tpu", "soft cap and sinks"),
]


@functools.cache
def expected(case: Case) -> list[np.ndarray]:
    *arrays, sinks = case.inputs()
    found = oracles.span_attention_gradients(*arrays, upstream(case), sinks, **case.options)
    return [x for x in found if x is not None]


def upstream(case: Case) -> np.ndarray:
    shape = (case.batch, case.q_len, case.num_q_heads, case.head_dim)
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("form", "name"), RUNS)
def test_gradients_agree_with_the_oracle(form, name):
    case = BY_NAME[name]
    query, key, value, lo, hi, sinks = case.inputs()

    def loss(query, key, value, *sinks):
        out = FORMS[form](query, key, value, lo, hi, sinks=sinks[0] if sinks else None, **case.options)
        return jnp.sum(out * upstream(case))

    wrt = [query, key, value] if sinks is None else [query, key, value, sinks]
    with jax.default_matmul_precision("highest"):
        found = jax.jit(jax.grad(loss, argnums=tuple(range(len(wrt)))))(*wrt)
    for got, want in zip(found, expected(case), strict=True):
        assert np.abs(got - want).max() < 2e-5 * np.abs(want).max()


def test_bfloat16_gradients_agree_with_the_oracle():
    case = BY_NAME["image runs"]
    query, key, value, lo, hi, _ = case.inputs()
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (query, key, value)]
    in_float32 = [np.asarray(x, np.float32) for x in rounded]
    want = oracles.span_attention_gradients(*in_float32, lo, hi, upstream(case), **case.options)[:3]

    def loss(*arrays):
        return jnp.sum(span_attention_xla(*arrays, lo, hi, **case.options) * upstream(case))

    for got, wanted in zip(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*rounded), want, strict=True):
        assert got.dtype == jnp.bfloat16
        assert np.abs(np.asarray(got, np.float64) - wanted).max() < 3e-2 * np.abs(wanted).max()
