"""What the gated delta rule refuses, and that the message names the argument."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from pallas_kernels.gated_delta import gated_delta_chunk, gated_delta_step
from pallas_kernels.gated_delta.cases import Case


def arrays(q_len=3, **changes):
    built = {n: None if x is None else jnp.asarray(x) for n, x in Case("", q_len).arrays().items()}
    return {**built, **changes}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("query", jnp.zeros((2, 3, 2, 15))),
        ("query", jnp.zeros((2, 3, 2, 16), jnp.float16)),
        ("key", jnp.zeros((2, 3, 32))),
        ("value", jnp.zeros((2, 3, 4))),
        ("value", jnp.zeros((2, 4, 4, 8))),
        ("value", jnp.zeros((2, 3, 3, 8))),
        ("log_decay", jnp.zeros((2, 3, 4), jnp.bfloat16)),
        ("log_decay", jnp.zeros((2, 3, 2))),
        ("beta", jnp.zeros((2, 3, 4), jnp.int32)),
        ("initial_state", jnp.zeros((2, 4, 16, 8), jnp.bfloat16)),
        ("initial_state", jnp.zeros((2, 4, 8, 16))),
        ("lengths", jnp.zeros((2, 1), jnp.int32)),
        ("lengths", jnp.zeros(2)),
        ("checkpoint_columns", jnp.zeros(2, jnp.int32)),
        ("checkpoint_columns", jnp.zeros((3, 1), jnp.int32)),
        ("checkpoint_columns", jnp.asarray([[4], [0]], jnp.int32)),
        ("checkpoint_columns", jnp.asarray([[-2], [0]], jnp.int32)),
    ],
    ids=lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else x,
)
def test_an_argument_that_does_not_fit_is_named(argument, value):
    with pytest.raises(ValueError, match=rf"gated_delta_chunk\(.*{argument}=.*got"):
        gated_delta_chunk(**arrays(**{argument: value}))


def test_no_columns_are_refused():
    empty = {n: x if n == "initial_state" else x[:, :0] for n, x in arrays().items() if x is not None}
    with pytest.raises(ValueError, match="at least one column"):
        gated_delta_chunk(**empty)


def test_a_step_takes_one_column():
    inputs = arrays()
    del inputs["checkpoint_columns"]
    with pytest.raises(ValueError, match=r"gated_delta_step\(value=.*gated_delta_chunk"):
        gated_delta_step(**inputs)


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_a_named_kernel_that_does_not_exist_is_refused_not_replaced(implementation, q_len):
    with pytest.raises(NotImplementedError, match=implementation):
        gated_delta_chunk(**arrays(q_len), implementation=implementation)


def test_an_unknown_implementation_is_refused():
    inputs = arrays(1)
    del inputs["checkpoint_columns"]
    with pytest.raises(ValueError, match="must be one of"):
        gated_delta_step(**inputs, implementation="triton")
