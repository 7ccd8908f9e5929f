"""The C++ step agrees with the reference, composes, and updates a donated state in place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import gated_delta_chunk, gated_delta_step
from pallas_kernels.gated_delta.cases import Case

CASES = (
    Case("one column", 1),
    Case("a real head", 1, num_key_heads=1, num_value_heads=2, key_dim=128, value_dim=128),
    Case("odd sizes", 1, key_dim=20, value_dim=37),
    Case("bfloat16", 1, dtype="bfloat16", value_dim=48),
    Case("an empty row", 1, lengths=(0, 1)),
    Case("everything forgotten", 1, decay=(0.0, 0.0)),
)


def step(case, seed=0):
    arrays = case.arrays(seed)
    del arrays["checkpoint_columns"]
    return jax.tree.map(jnp.asarray, arrays)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_agrees_with_the_reference(native_kernels, case):
    arrays = step(case)
    found = gated_delta_step(**arrays, implementation="native")
    expected = gated_delta_step(**arrays, implementation="reference")
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype
        got, wanted = (np.asarray(x, np.float32) for x in (got, wanted))
        np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=1e-2 if case.dtype == "bfloat16" else 0)
    if case.lengths is not None:
        np.testing.assert_array_equal(found[1][0], arrays["initial_state"][0])


def test_it_is_the_best_form_here_and_composes_with_vmap_and_grad(native_kernels):
    case = dataclasses.replace(CASES[0], value_dim=24)
    both = jax.tree.map(lambda *x: jnp.stack(x), step(case), step(case, seed=1))
    program = jax.jit(gated_delta_step).lower(**step(case)).as_text()
    assert "pallas_kernels.gated_delta_step" in program

    def mapped(form):
        return jax.vmap(lambda arrays: gated_delta_step(**arrays, implementation=form))(both)

    def gradients(form):
        def loss(arrays):
            out, state = gated_delta_step(**arrays, implementation=form)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(state))

        arrays = {name: x for name, x in step(case).items() if x is not None}
        return jax.grad(loss)(arrays)

    for found, expected in ((mapped("native"), mapped("xla")), (gradients("native"), gradients("xla"))):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def test_a_donated_state_is_updated_in_place(native_kernels):
    arrays = step(CASES[0])
    state = arrays.pop("initial_state")
    kept = np.array(state)

    def advance(state):
        return gated_delta_step(**arrays, initial_state=state, implementation="native")[1]

    jax.jit(advance)(state)
    np.testing.assert_array_equal(state, kept)  # not donated: as it was
    where = state.unsafe_buffer_pointer()
    assert jax.jit(advance, donate_argnums=0)(state).unsafe_buffer_pointer() == where


def test_prefill_has_no_native_form_and_says_so(native_kernels):
    arrays = jax.tree.map(jnp.asarray, Case("more", 3).arrays())
    gated_delta_chunk(**arrays)
    with pytest.raises(NotImplementedError, match="one column at a time"):
        gated_delta_chunk(**arrays, implementation="native")
