"""The C++ form agrees with the float64 oracle, is chosen where it runs, and says why where it does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.span_attention import available_implementations, span_attention
from pallas_kernels.span_attention.cases import CASES
from tests.pallas_kernels.span_attention import oracles

TAKEN = [case for case in CASES if case.logits_soft_cap is None and not case.has_sinks]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_every_case_agrees_with_the_oracle(native_kernels, case, dtype):
    *arrays, lo, hi, _ = case.inputs()
    arrays = [jnp.asarray(x, dtype) for x in arrays]
    found = span_attention(*arrays, lo, hi, softmax_scale=case.softmax_scale, implementation="native")
    assert found.dtype == dtype
    rounded = [np.asarray(x, np.float32) for x in arrays]
    expected = oracles.span_attention(*rounded, lo, hi, None, **case.options)
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=tolerance, rtol=tolerance)


def call(query, key, value, hi, **options):
    lo = jnp.zeros_like(hi)
    return span_attention(query, key, value, lo, hi, softmax_scale=0.3, **options)


@pytest.fixture
def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (3, 2, 5, 4, 20))
    key, value = (jax.random.normal(k, (3, 2, 2, 9, 20)) for k in keys[1:])
    return query, key, value, jnp.broadcast_to(jnp.arange(5) + 4, (3, 2, 5)).astype(jnp.int32)


def test_it_is_the_best_form_here_and_composes_with_vmap_grad_and_loops(native_kernels, arrays):
    assert available_implementations()["native"] is None
    program = jax.jit(call).lower(*(x[0] for x in arrays)).as_text()
    assert "pallas_kernels.span_attention_float32" in program

    def forms(function):
        return [function(implementation) for implementation in ("native", "xla")]

    for found, expected in (
        forms(lambda form: jax.vmap(lambda *x: call(*x, implementation=form))(*arrays)),
        forms(lambda form: jax.lax.map(lambda x: call(*x, implementation=form), arrays)),
        *zip(
            *forms(
                lambda form: jax.grad(
                    lambda *x: jnp.sum(jnp.sin(call(*x, arrays[3][0], implementation=form))), (0, 1, 2)
                )(*(x[0] for x in arrays[:3]))
            ),
            strict=True,
        ),
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_nan_that_is_read_is_not_hidden(native_kernels, arrays):
    query, key, value, hi = (x[0] for x in arrays)
    found = call(query, key.at[:, :, 5].set(jnp.nan), value, hi, implementation="native")
    assert bool(jnp.isnan(found[:, 1:]).all())
    assert not bool(jnp.isnan(found[:, 0]).any())  # reads rows 0 to 4


def test_what_it_cannot_take_goes_to_the_xla_form_unless_it_was_named(native_kernels, arrays):
    arrays = [x[0] for x in arrays]
    capped = call(*arrays, logits_soft_cap=2.0)
    np.testing.assert_array_equal(capped, call(*arrays, logits_soft_cap=2.0, implementation="xla"))
    with pytest.raises(NotImplementedError, match="it has no logits_soft_cap"):
        call(*arrays, logits_soft_cap=2.0, implementation="native")


@pytest.mark.parametrize("setting", ["off", "empty"])
def test_without_the_compiled_library_the_xla_form_runs_and_the_reason_is_told(
    arrays, setting, tmp_path, monkeypatch
):
    monkeypatch.setenv(native.ENV, "off" if setting == "off" else str(tmp_path))
    native._library.cache_clear()
    reason = available_implementations()["native"]
    assert reason is not None
    assert ("PALLAS_KERNELS_NATIVE=off" if setting == "off" else native.BUILD_COMMAND) in reason
    arrays = [x[0] for x in arrays]
    np.testing.assert_array_equal(call(*arrays), call(*arrays, implementation="xla"))
    with pytest.raises(NotImplementedError, match="cannot run"):
        call(*arrays, implementation="native")


def test_a_failing_compiler_is_told_with_its_message(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="false could not compile the native kernels"):
        native.build(tmp_path)
    assert not list(tmp_path.iterdir())
