"""Every form of the gated delta rule against a float64 loop and against each other."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import gated_delta_chunk, gated_delta_step
from pallas_kernels.gated_delta.cases import CASES, CHUNK, Case
from tests.pallas_kernels.gated_delta import oracles

FORMS = ("reference", "xla")
COLUMNS = ("query", "key", "value", "log_decay", "beta")


@functools.partial(jax.jit, static_argnames="implementation")
def chunk(arrays, implementation=None):
    return gated_delta_chunk(**arrays, implementation=implementation)


def on_device(arrays):
    return jax.tree.map(jnp.asarray, arrays)


def assert_close(got, expected, tolerance=1e-5):
    """Within `tolerance` of the largest expected magnitude; NaN where NaN is expected."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    scale = max(np.nanmax(np.abs(expected), initial=0.0), 1e-30)
    np.testing.assert_allclose(got / scale, expected / scale, rtol=0, atol=tolerance)


def columns(arrays, start, stop):
    return {name: x[:, start:stop] if name in COLUMNS else x for name, x in arrays.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_form_agrees_with_the_float64_loop(case, form):
    arrays = case.arrays()
    output, state, saved = chunk(on_device(arrays), form)
    expected_output, expected_state, expected_saved = oracles.gated_delta(**arrays)
    assert output.dtype == arrays["value"].dtype
    assert state.dtype == jnp.float32
    assert_close(output, expected_output, 1e-5 if output.dtype == jnp.float32 else 2**-8)
    assert_close(state, expected_state)
    if saved is None:
        assert expected_saved is None
    else:
        assert saved.dtype == jnp.float32
        assert_close(saved, expected_saved)


def test_the_cases_have_distinct_names():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("form", FORMS)
def test_64_columns_of_decay_1e_12_equal_a_column_at_a_time(form):
    arrays = on_device(Case("", 64, decay=(1e-12, 1e-12)).arrays())
    output, state, _ = chunk(arrays, form)
    one_by_one = []
    for column in range(64):
        step, arrays["initial_state"] = gated_delta_step(
            **{n: x for n, x in columns(arrays, column, column + 1).items() if n != "checkpoint_columns"},
            implementation=form,
        )
        one_by_one.append(step)
    assert_close(output, jnp.concatenate(one_by_one, axis=1))
    assert_close(state, arrays["initial_state"])


def test_decays_after_an_extreme_one_keep_their_precision():
    # A difference of running totals would take log decays near -1e-3 from totals near -1700.
    arrays = Case("", CHUNK, batch=1, decay=(0.999, 1.0), beta=(0.5, 1.0)).arrays()
    arrays["log_decay"][:, :60] = np.log(1e-12)
    output, state, _ = chunk(on_device(arrays), "xla")
    expected_output, expected_state, _ = oracles.gated_delta(**arrays)
    assert_close(output[:, 60:], expected_output[:, 60:], 2e-6)
    assert_close(state, expected_state, 2e-6)


@pytest.mark.parametrize("sizes", [(1,) * 6 + (64,), (64, 6), (35, 35), (3, 64, 2, 1), (69, 1)], ids=str)
def test_splitting_the_columns_changes_neither_output_nor_state(sizes):
    arrays = on_device(Case("", 70).arrays())
    whole_output, whole_state, _ = chunk(arrays)
    outputs, start = [], 0
    for size in sizes:
        output, arrays["initial_state"], _ = chunk(columns(arrays, start, start + size))
        outputs.append(output)
        start += size
    assert start == 70
    assert_close(jnp.concatenate(outputs, axis=1), whole_output)
    assert_close(arrays["initial_state"], whole_state)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [1, 2])
def test_right_padding_changes_neither_output_nor_state(batch, form):
    arrays = Case("", 70, batch=batch).arrays()
    output, state, _ = chunk(on_device(arrays), form)
    padded = dict(arrays, lengths=np.full(batch, 70, np.int32))
    for name in COLUMNS:
        garbage = np.full((batch, 3, *arrays[name].shape[2:]), np.nan, np.float32)
        padded[name] = np.concatenate([arrays[name], garbage], axis=1)
    padded_output, padded_state, _ = chunk(on_device(padded), form)
    assert_close(padded_output[:, :70], output)
    assert_close(padded_state, state)
    np.testing.assert_array_equal(padded_output[:, 70:], 0)


def test_a_row_does_not_depend_on_the_others():
    arrays = Case("", 66, batch=3, checkpoint_columns=((65,), (2,), (-1,))).arrays()
    batched = chunk(on_device(arrays))
    for row in range(3):
        alone = {name: None if x is None else x[row : row + 1] for name, x in arrays.items()}
        for got, expected in zip(chunk(on_device(alone)), batched, strict=True):
            assert_close(got[0], expected[row])


def test_the_state_after_a_checkpoint_column_is_the_state_of_a_prefill_that_ends_there():
    case = Case("", 140, checkpoint_columns=((1, 63, 64, 65, 128, 129, 139, 140),) * 2)
    arrays = on_device(case.arrays())
    _, _, saved = chunk(arrays)
    for slot, column in enumerate(case.checkpoint_columns[0]):
        _, state, _ = chunk({**columns(arrays, 0, column), "checkpoint_columns": None})
        assert_close(saved[:, slot], state)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("q_len", [1, 70])
def test_a_traced_checkpoint_column_that_does_not_exist_gives_nan(q_len, form):
    arrays = on_device(Case("", q_len, batch=1).arrays())
    arrays["checkpoint_columns"] = jnp.asarray([[q_len + 1, -2, q_len, 300]], jnp.int32)
    _, state, saved = chunk(arrays, form)
    assert np.isnan(saved[0, [0, 1, 3]]).all()
    np.testing.assert_array_equal(saved[0, 2], state[0])


@pytest.mark.parametrize("q_len", [1, 5, 66])
def test_gradients_are_those_of_the_column_by_column_form(q_len):
    arrays = on_device(Case("", q_len, checkpoint_columns=((q_len,), (q_len // 2,))).arrays())
    names = (*COLUMNS, "initial_state")
    shapes = jax.eval_shape(chunk, arrays)
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.random.normal(key, x.shape) for key, x in zip(keys, shapes, strict=True)]

    def loss(inputs, form):
        results = gated_delta_chunk(**{**arrays, **inputs}, implementation=form)
        return sum(jnp.sum(w * x) for w, x in zip(weights, results, strict=True))

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    inputs = {name: arrays[name] for name in names}
    got, expected = (gradient(inputs, form) for form in ("xla", "reference"))
    for name in names:
        assert np.abs(expected[name]).max() > 0.01, name
        assert_close(got[name], expected[name])


def test_padding_and_extreme_decays_have_finite_gradients():
    arrays = on_device(Case("", 66, lengths=(66, 40), decay=(0.9, 1.0), rare_decay=1e-12).arrays())

    def loss(inputs):
        output, state, _ = gated_delta_chunk(**{**arrays, **inputs})
        return jnp.sum(output**2) + jnp.sum(state**2)

    gradients = jax.jit(jax.grad(loss))({name: arrays[name] for name in COLUMNS})
    for name, gradient in gradients.items():
        assert np.isfinite(gradient).all(), name
        np.testing.assert_array_equal(gradient[1, 40:], 0)


@pytest.mark.parametrize("q_len", [1, 66])
def test_vmap_maps_over_calls(q_len):
    case = Case("", q_len, batch=1, checkpoint_columns=((q_len,),))
    calls = [on_device(case.arrays(seed)) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *calls)
    mapped = jax.jit(jax.vmap(lambda arrays: gated_delta_chunk(**arrays)))(stacked)
    for index, arrays in enumerate(calls):
        for got, expected in zip(mapped, chunk(arrays), strict=True):
            assert_close(got[index], expected)


def test_a_bfloat16_model_keeps_a_float32_state_and_large_readouts_stay_finite():
    arrays = on_device(Case("", 8, dtype="bfloat16", value_scale=3e5).arrays())
    output, state, _ = chunk(arrays)
    assert output.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    assert np.isfinite(np.asarray(output, np.float32)).all()
    assert np.abs(np.asarray(output, np.float32)).max() > 1e5
    step_inputs = {name: x for name, x in columns(arrays, 0, 1).items() if name != "checkpoint_columns"}
    step, state = gated_delta_step(**{**step_inputs, "initial_state": state})
    assert step.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    assert np.isfinite(np.asarray(step, np.float32)).all()


def test_a_donated_step_updates_the_state_in_place_without_a_second_copy():
    arrays = on_device(Case("", 1, batch=4, num_value_heads=8, key_dim=128, value_dim=128).arrays())
    state = arrays.pop("initial_state")
    arrays.pop("checkpoint_columns")
    step = jax.jit(lambda state, arrays: gated_delta_step(**arrays, initial_state=state), donate_argnums=0)
    memory = step.lower(state, arrays).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= state.nbytes
    assert memory.temp_size_in_bytes < state.nbytes // 16


def test_long_prefills_hold_no_states_but_the_current_one():
    case = Case("", 2048, batch=1, num_key_heads=2, num_value_heads=2, key_dim=128, value_dim=128)
    arrays = on_device(case.arrays())
    memory = jax.jit(lambda arrays: gated_delta_chunk(**arrays)).lower(arrays).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 6 * arrays["value"].nbytes


def test_the_input_state_is_unchanged():
    arrays = on_device(Case("", 66).arrays())
    before = np.array(arrays["initial_state"])
    chunk(arrays)
    gated_delta_step(**{n: x for n, x in columns(arrays, 0, 1).items() if n != "checkpoint_columns"})
    np.testing.assert_array_equal(arrays["initial_state"], before)
