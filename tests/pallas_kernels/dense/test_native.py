"""The C++ product of a matrix and a few rows is XLA's, also inside maps, loops and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.ops import linear, quantize
from pallas_kernels import native
from pallas_kernels.dense import dense_native, dense_reference, takes
from pallas_kernels.dense.api import MAX_ROWS


def arrays(num_rows, channels, width, dtype):
    draw = np.random.default_rng([num_rows, channels, width])
    rows = jnp.asarray(draw.normal(size=(num_rows, width)), jnp.float32)
    matrix = (
        draw.integers(-127, 128, (channels, width))
        if dtype == "int8"
        else draw.normal(size=(channels, width))
    )
    return rows, jnp.asarray(matrix, dtype)


@pytest.mark.parametrize("dtype", list(MAX_ROWS))
@pytest.mark.parametrize(
    "shape", [(1, 300, 576), (2, 7, 33), (3, 64, 16), (7, 130, 48), (8, 1, 5), (13, 9, 100)]
)
def test_a_product_is_that_of_the_same_numbers(native_kernels, shape, dtype):
    rows, matrix = arrays(*shape, dtype)
    expected = np.asarray(rows, np.float64) @ np.asarray(matrix, np.float64).T
    found = dense_native(rows, matrix)
    for product in (found, dense_reference(rows, matrix)):
        np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_maps_and_gradients_are_those_of_the_product(native_kernels, dtype):
    rows, matrix = arrays(6, 20, 24, dtype)
    mapped = jax.vmap(lambda rows: dense_native(rows, matrix))(rows.reshape(3, 2, 24))
    np.testing.assert_allclose(mapped.reshape(6, 20), dense_native(rows, matrix), rtol=1e-6)

    def loss(product):
        return jax.grad(lambda *x: jnp.sum(jnp.sin(product(*x) / 8)), (0, 1))(rows, matrix)

    plain = loss(dense_reference)
    for found, expected in zip(loss(dense_native), plain, strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (found, expected)), rtol=1e-2, atol=1e-5
        )


@pytest.mark.parametrize("dtype", list(MAX_ROWS))
def test_linear_takes_it_for_few_rows_and_means_the_same(native_kernels, monkeypatch, dtype):
    rows, matrix = arrays(2, 40, 64, "float32" if dtype == "int8" else dtype)
    weight = quantize(np.asarray(matrix)) if dtype == "int8" else matrix
    program = jax.jit(linear).lower(rows, weight).as_text()
    assert f"pallas_kernels.dense_{dtype}" in program
    found = linear(rows, weight)
    monkeypatch.setenv(native.ENV, "off")
    native._library.cache_clear()
    assert f"dense_{dtype}" not in jax.jit(lambda *x: linear(*x)).lower(rows, weight).as_text()
    np.testing.assert_allclose(found, linear(rows, weight), rtol=1e-3, atol=1e-3)


def test_more_rows_are_left_to_xla(native_kernels):
    for dtype, most in MAX_ROWS.items():
        matrix = jnp.zeros((4, 4), dtype)
        assert takes(most, matrix)
        assert not takes(most + 1, matrix)
    assert not takes(1, jnp.zeros((4, 4), jnp.float16))


def test_without_the_compiled_library_nothing_is_taken(monkeypatch):
    monkeypatch.setenv(native.ENV, "off")
    assert not takes(1, jnp.zeros((4, 4), jnp.float32))
