"""The TPU kernels, interpreted on CPU: every case of the list, races, gradients, refusals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gated_delta import gated_delta_chunk, gated_delta_step
from pallas_kernels.gated_delta.cases import CASES, CHUNK, Case
from pallas_kernels.gated_delta.tpu import gated_delta_chunk_tpu, gated_delta_step_tpu, unsupported
from tests.pallas_kernels.gated_delta import oracles

CORE = ("three_chunks_and_two", "padded_rows", "bfloat16")
STATE_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # bfloat16 inputs multiply as bfloat16
BY_NAME = {case.name: case for case in CASES}


def assert_close(got, expected, tolerance):
    """Within `tolerance` of the largest expected magnitude; NaN where NaN is expected."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    scale = max(np.nanmax(np.abs(expected), initial=0.0), 1e-30)
    np.testing.assert_allclose(got / scale, expected / scale, rtol=0, atol=tolerance)


def on_device(case):
    return jax.tree.map(jnp.asarray, case.arrays())


def check_chunk(case, interpret):
    arrays = on_device(case)
    got = jax.jit(functools.partial(gated_delta_chunk_tpu, interpret=interpret))(**arrays)
    for x, expected in zip(got, oracles.gated_delta(**case.arrays()), strict=True):
        if expected is None:
            assert x is None
        else:
            assert_close(x, expected, STATE_TOLERANCE[case.dtype])
    assert got[0].dtype == arrays["value"].dtype
    assert got[1].dtype == jnp.float32
    return got


def check_step(case, interpret):
    arrays = on_device(case)
    del arrays["checkpoint_columns"]
    got = jax.jit(functools.partial(gated_delta_step_tpu, interpret=interpret))(**arrays)
    for x, expected in zip(got, oracles.gated_delta(**case.arrays()), strict=False):
        assert_close(x, expected, 1e-5 if x.dtype == jnp.float32 else 2**-8)


@pytest.mark.parametrize("name", CORE)
def test_the_prefill_kernel_agrees_with_the_float64_loop(name):
    check_chunk(BY_NAME[name], True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in CORE])
def test_the_prefill_kernel_agrees_with_the_float64_loop_on_the_other_cases(name):
    check_chunk(BY_NAME[name], True)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_a_simulated_tpu_finds_no_race_in_the_prefill_kernel(name):
    check_chunk(BY_NAME[name], pltpu.InterpretParams(detect_races=True))
    assert not races_found()


@pytest.mark.parametrize(
    "case",
    [
        Case("kept rows", 1, batch=3, num_value_heads=16, num_key_heads=4, lengths=(1, 0, 1)),
        Case("bfloat16", 1, dtype="bfloat16", key_dim=64, value_dim=128, num_key_heads=3, num_value_heads=3),
    ],
    ids=lambda case: case.name,
)
def test_the_step_kernel_agrees_with_the_float64_loop_without_a_race(case):
    check_step(case, True)
    check_step(case, pltpu.InterpretParams(detect_races=True))
    assert not races_found()


def races_found() -> bool:
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return interpret_pallas_call.races is not None and interpret_pallas_call.races.races_found


def test_gradients_are_those_of_the_xla_form():
    arrays = on_device(Case("", 5, batch=1, checkpoint_columns=((3,),)))
    inputs = {name: arrays.pop(name) for name in ("query", "value", "log_decay", "initial_state")}

    def loss(inputs, form):
        return sum(jnp.sum(jnp.sin(x)) for x in form(**inputs, **arrays))

    kernel = functools.partial(gated_delta_chunk_tpu, interpret=True)
    got, expected = (
        jax.jit(jax.grad(loss), static_argnums=1)(inputs, f) for f in (kernel, gated_delta_chunk)
    )
    for name in inputs:
        assert np.abs(expected[name]).max() > 0.01, name
        assert_close(got[name], expected[name], 1e-5)


def test_vmap_maps_over_calls():
    calls = [Case("", 1, batch=1).arrays(seed) for seed in range(2)]
    for call in calls:
        del call["checkpoint_columns"]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *calls)
    step = functools.partial(gated_delta_step_tpu, interpret=True)
    mapped = jax.jit(jax.vmap(lambda arrays: step(**arrays)))(stacked)
    for index, call in enumerate(calls):
        for got, expected in zip(mapped, gated_delta_step(**call), strict=True):
            assert_close(got[index], expected, 1e-5)


def test_head_dims_that_the_kernels_cannot_take_are_said():
    def refusal(key_dim, value_dim, heads=8, columns=CHUNK):
        return unsupported(jnp.zeros((1, columns, heads, key_dim)), jnp.zeros((1, columns, heads, value_dim)))

    assert refusal(64, 256) is None
    assert "key head dims" in refusal(320, 64)
    assert "value head dims" in refusal(64, 36)
    assert "not a multiple of 8" in refusal(256, 256, heads=49, columns=1)
    assert refusal(256, 256, heads=49) is None
