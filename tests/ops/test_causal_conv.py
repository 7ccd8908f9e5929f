"""The causal convolution against a float64 loop, and that splits and padding leave no trace."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.ops.gated_delta import causal_conv, conv_history
from tests.pallas_kernels.gated_delta import oracles


def draw(batch, q_len, channels=5, width=4, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(q_len), 3)
    x = jax.random.normal(keys[0], (batch, q_len, channels))
    weight = jax.random.normal(keys[1], (channels, width), dtype)
    return x, weight, jax.random.normal(keys[2], (batch, width - 1, channels), dtype)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("q_len", [1, 2, 3, 9])
def test_it_agrees_with_the_float64_loop(q_len, width):
    x, weight, history = draw(2, q_len, width=width)
    output, after = causal_conv(x, weight, history=history)
    expected, expected_after = oracles.causal_conv(x, weight, history=history)
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(after, np.asarray(expected_after, np.float32))


def test_padding_reaches_neither_the_history_nor_a_real_column():
    x, weight, history = draw(4, 6)
    lengths = jnp.asarray([6, 4, 1, 0], jnp.int32)
    expected, expected_after = oracles.causal_conv(x, weight, history=history, lengths=lengths)
    real = np.arange(6) < np.asarray(lengths)[:, None]
    garbage = jnp.where(real[..., None], x, jnp.nan)
    output, after = jax.jit(causal_conv)(garbage, weight, history=history, lengths=lengths)
    np.testing.assert_allclose(output[real], expected[real], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(after, np.asarray(expected_after, np.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("sizes", [(1,) * 9, (2, 7), (4, 1, 4)], ids=str)
def test_splitting_the_columns_changes_nothing(sizes, dtype):
    x, weight, history = draw(2, 9, dtype=dtype)
    whole, whole_after = causal_conv(x, weight, history=history)
    outputs, start = [], 0
    for size in sizes:
        output, history = causal_conv(x[:, start : start + size], weight, history=history)
        outputs.append(output)
        start += size
    assert history.dtype == dtype
    assert whole.dtype == jnp.float32
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), whole, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(history, whole_after)


def test_a_history_within_a_call_is_that_of_a_call_that_ends_there():
    x, weight, history = draw(2, 9)
    after = jnp.asarray([[0, 1, 9], [5, 3, 2]], jnp.int32)
    found = conv_history(x, history=history, after=after)
    for (row, slot), count in np.ndenumerate(np.asarray(after)):
        lengths = jnp.full(2, count, jnp.int32)
        _, expected = causal_conv(x, weight, history=history, lengths=lengths)
        np.testing.assert_array_equal(found[row, slot], expected[row])


def test_padding_has_zero_gradients_even_where_it_holds_nan():
    x, weight, history = draw(1, 5)
    x = x.at[:, 3:].set(jnp.nan)

    def loss(x, weight):
        output, after = causal_conv(x, weight, history=history, lengths=jnp.asarray([3], jnp.int32))
        return jnp.sum(jax.nn.silu(output[:, :3])) + jnp.sum(after)

    by_x, by_weight = jax.grad(loss, argnums=(0, 1))(x, weight)
    assert np.isfinite(by_weight).all()
    assert np.abs(by_x[:, :3]).min() > 0
    np.testing.assert_array_equal(by_x[:, 3:], 0)


@pytest.mark.parametrize(
    ("name", "shape"), [("weight", (4, 4)), ("history", (2, 4, 5)), ("history", (3, 5)), ("lengths", (3,))]
)
def test_a_shape_that_does_not_fit_is_named(name, shape):
    x, weight, history = draw(2, 3)
    arguments = {"weight": weight, "history": history, name: jnp.zeros(shape, jnp.int32)}
    with pytest.raises(ValueError, match=rf"causal_conv\({name}="):
        causal_conv(x, **arguments)
