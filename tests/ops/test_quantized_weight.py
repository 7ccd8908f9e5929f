"""int8 weights: what they round to, and linear maps that mean the same whichever form computes them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.ops import QuantizedWeight, embed, linear, quantize, routed_mlp

D = 72
RANDOM = np.random.default_rng(0)
WEIGHT = (RANDOM.standard_normal((3, 7, D)) * np.exp(RANDOM.standard_normal((3, 7, 1)))).astype(np.float32)
QUANTIZED = quantize(WEIGHT)


def whole(weight):
    """The weight that a quantised one stands for, float64."""
    return np.asarray(weight.values, np.float64) * np.asarray(weight.scale, np.float64)[..., None]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_value_is_within_half_a_step_and_the_greatest_is_127(dtype):
    weight = WEIGHT.astype(dtype)
    found = quantize(weight)
    assert found.values.dtype == jnp.int8
    assert found.shape == weight.shape
    off = np.abs(whole(found) - weight.astype(np.float64))
    assert np.all(off <= np.asarray(found.scale)[..., None] * 0.5001)
    assert np.all(np.abs(np.asarray(found.values, int)).max(-1) == 127)


def test_blocks_of_channels_change_nothing(monkeypatch):
    monkeypatch.setattr("jaxinfer.ops.quantized_weight._BLOCK_VALUES", 2 * D)
    jax.tree.map(np.testing.assert_array_equal, quantize(WEIGHT), QUANTIZED)


def test_a_channel_of_zeros_gives_zeros_and_one_that_is_not_finite_gives_nan():
    weight = WEIGHT[0].copy()
    weight[1], weight[2, 3], weight[4, 5] = 0, np.nan, -np.inf
    found = np.asarray(linear(jnp.ones((1, D)), quantize(weight)))[0]
    assert found[1] == 0
    assert np.all(np.isnan(found[[2, 4]]))
    assert np.all(np.isfinite(found[[0, 3, 5, 6]]))


@pytest.mark.parametrize(("num_rows", "tolerance"), [(1, 2e-5), (8, 2e-5), (13, 2e-5), (40, 2e-3)])
def test_linear_maps_agree_with_float64(num_rows, tolerance):
    """A few rows on a CPU as two int8 halves, more of them as bfloat16 with the weight's exact values."""
    x = RANDOM.standard_normal((num_rows, D)).astype(np.float32)
    expected = np.einsum("rd,abd->rab", x.astype(np.float64), whole(QUANTIZED))
    found = jax.jit(linear)(x, QUANTIZED)
    assert found.dtype == jnp.float32
    bound = np.abs(x).sum(1)[:, None, None] * np.abs(whole(QUANTIZED)).max(-1)
    assert np.max(np.abs(found - expected) / bound) < tolerance


def test_rows_of_zeros_infinities_and_nan_stay_what_they_are():
    x = np.ones((4, D), np.float32)
    x[1], x[2, 0], x[3, 0] = 0, np.inf, np.nan
    found = np.asarray(linear(jnp.asarray(x), QUANTIZED))
    assert np.all(np.isfinite(found[0]))
    assert np.all(found[1] == 0)
    assert np.all(np.isnan(found[2:]))


@pytest.mark.parametrize("num_rows", [2, 40])
def test_rows_have_the_gradients_of_the_weight_that_is_stood_for(num_rows):
    x = RANDOM.standard_normal((num_rows, D)).astype(np.float32)
    out_grad = RANDOM.standard_normal((num_rows, 3, 7)).astype(np.float32)
    grad = jax.grad(lambda x: jnp.sum(out_grad * linear(x, QUANTIZED)))(x)
    exact = np.einsum("rab,abd->rd", out_grad, whole(QUANTIZED))
    np.testing.assert_allclose(grad, exact, atol=2e-2 * np.abs(exact).max())


def test_vmap_and_loops_change_nothing():
    x = RANDOM.standard_normal((3, 2, D)).astype(np.float32)
    expected = np.stack([linear(part, QUANTIZED) for part in x])
    np.testing.assert_allclose(jax.vmap(linear, (0, None))(x, QUANTIZED), expected, rtol=1e-6, atol=1e-6)
    looped = jax.lax.map(lambda part: linear(part, QUANTIZED), x)
    np.testing.assert_allclose(looped, expected, rtol=1e-6, atol=1e-6)


def test_embedding_rows_are_those_of_the_weight_that_is_stood_for():
    table = quantize(WEIGHT[0])
    found = embed(table, np.array([[0, 6, 7, -1]], np.int32))
    np.testing.assert_allclose(found[0], whole(table)[[0, 6, 0, 0]], rtol=1e-6)


def experts(num_rows):
    x = RANDOM.standard_normal((num_rows, D)).astype(np.float32)
    gate_up, down = (RANDOM.standard_normal(shape) / 8 for shape in ((5, 2, 24, D), (5, D, 24)))
    ids = np.stack([RANDOM.permutation(5)[:2] for _ in range(num_rows)]).astype(np.int32)
    shares = RANDOM.random((num_rows, 2)).astype(np.float32)
    return x, quantize(gate_up), quantize(down), ids, shares


@pytest.mark.parametrize("num_rows", [1, 150])
@pytest.mark.parametrize("implementation", ["blocked", "ragged"])
def test_quantised_experts_are_those_of_the_weights_that_are_stood_for(implementation, num_rows):
    x, gate_up, down, ids, shares = experts(num_rows)

    def total(x, gate_up, down):
        out = routed_mlp(x, gate_up, down, ids, shares, activation=jax.nn.silu, implementation=implementation)
        return jnp.sum(jnp.sin(out)), out

    run = jax.value_and_grad(total, has_aux=True)
    exact = [jnp.asarray(whole(bank), jnp.float32) for bank in (gate_up, down)]
    for found, expected in zip(
        jax.tree.leaves(run(x, gate_up, down)), jax.tree.leaves(run(x, *exact)), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=2e-2 * float(jnp.abs(expected).max()))


def test_a_vmapped_axis_of_rows_goes_through_quantised_experts():
    x, gate_up, down, ids, shares = experts(6)

    def run(x, ids, shares):
        return routed_mlp(x, gate_up, down, ids, shares, activation=jax.nn.silu, implementation="blocked")

    parts = [a.reshape(2, 3, *a.shape[1:]) for a in (x, ids, shares)]
    np.testing.assert_allclose(jax.vmap(run)(*parts).reshape(6, D), run(x, ids, shares), rtol=1e-5, atol=1e-5)


def test_a_quantised_weight_passes_through_jit_as_a_pytree():
    assert isinstance(jax.jit(lambda weight: weight)(QUANTIZED), QuantizedWeight)
