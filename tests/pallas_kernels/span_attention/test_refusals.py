"""What span attention refuses, and that the message names the argument."""

import jax.numpy as jnp
import pytest

from pallas_kernels.span_attention import span_attention


def arguments(**changes):
    built = {
        "query": jnp.zeros((2, 3, 4, 16)),
        "key": jnp.zeros((2, 2, 5, 16)),
        "value": jnp.zeros((2, 2, 5, 16)),
        "span_lo": jnp.zeros((2, 3), jnp.int32),
        "span_hi": jnp.zeros((2, 3), jnp.int32),
        "softmax_scale": 0.25,
    }
    return {**built, **changes}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("query", jnp.zeros((2, 3, 64))),
        ("query", jnp.zeros((2, 3, 4, 16), jnp.float16)),
        ("key", jnp.zeros((2, 2, 5, 16), jnp.bfloat16)),
        ("key", jnp.zeros((1, 2, 5, 16))),
        ("value", jnp.zeros((2, 2, 6, 16))),
        ("value", jnp.zeros((2, 2, 5, 8))),
        ("span_lo", jnp.zeros((2, 4), jnp.int32)),
        ("span_hi", jnp.zeros((2, 3))),
        ("sinks", jnp.zeros(3)),
        ("sinks", jnp.zeros(4, jnp.int32)),
        ("softmax_scale", 0.0),
        ("softmax_scale", jnp.ones(())),
        ("logits_soft_cap", -1.0),
        ("logits_soft_cap", float("inf")),
        ("implementation", "triton"),
    ],
    ids=lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else str(x),
)
def test_an_argument_that_does_not_fit_is_named(argument, value):
    with pytest.raises(ValueError, match=rf"span_attention\({argument}=\.\.\.\) must be .*got"):
        span_attention(**arguments(**{argument: value}))


def test_key_heads_that_do_not_divide_the_query_heads_are_refused():
    rows = jnp.zeros((2, 3, 5, 16))
    with pytest.raises(ValueError, match="divides query's N=4; got K=3"):
        span_attention(**arguments(key=rows, value=rows))


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_a_named_kernel_that_cannot_run_here_is_refused_not_replaced(implementation):
    with pytest.raises(NotImplementedError, match=rf"{implementation}.*implementation=None"):
        span_attention(**arguments(implementation=implementation))


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (3, 0)])
def test_nothing_to_read_or_no_one_to_read_it_gives_zeros(q_len, kv_len):
    spans = jnp.zeros((2, q_len), jnp.int32)
    rows = jnp.zeros((2, 2, kv_len, 16))
    out = span_attention(
        **arguments(query=jnp.ones((2, q_len, 4, 16)), key=rows, value=rows, span_lo=spans, span_hi=spans)
    )
    assert out.shape == (2, q_len, 4, 16)
    assert not out.any()
