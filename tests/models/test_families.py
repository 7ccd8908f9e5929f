"""Every family gives transformers' logits, whatever the steps that a prompt is taken in."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models import forward
from jaxinfer.state import KvWindowPolicy, init_state
from tests.models.tiny_models import read_config, tiny_params
from tests.oracles.tiny_checkpoints import load_oracle

FAMILIES = ("llama", "llama_rope3", "mistral", "qwen3", "qwen3_moe", "gemma3_text")
SLIDING = ("mistral", "gemma3_text")  # windows of 8; the prompts have 40 tokens
TOLERANCE = 2e-5
STEPS = {
    "one shot": [40],
    "uneven chunks": [17, 8, 8, *[1] * 7],  # longer than the window and than max_append, then decode
    "token by token": [1] * 40,
}


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def prompt(name):
    return load_oracle(name).inputs["input_ids"].astype(np.int32)


def assert_is_oracle(logits, name):
    expected = load_oracle(name).logits
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


@functools.partial(jax.jit, static_argnames="config")
def step(params, tokens, state, *, config):
    return forward(params, tokens, state, config=config, logits="all")


def in_steps(name, lengths, policy):
    """Logits [T, V] of the prompt taken in steps, and the state after them."""
    config, tokens = read_config(name), prompt(name)
    state = init_state(config, capacity=48, max_append=8, kv_window=policy)
    parts = []
    for end in np.cumsum(lengths):
        start = end - lengths[len(parts)]
        logits, state = step(tiny_params(name), tokens[:, start:end], state, config=config)
        parts.append(np.asarray(logits[0]))
    return np.concatenate(parts), state


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_without_a_cache_are_those_of_transformers(name):
    logits, state = forward(tiny_params(name), prompt(name), config=read_config(name), logits="all")
    assert state is None
    assert_is_oracle(np.asarray(logits[0]), name)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_in_steps_are_those_of_transformers(name, steps):
    logits, state = in_steps(name, STEPS[steps], KvWindowPolicy.off())
    assert_is_oracle(logits, name)
    assert state.length.tolist() == [40]
    assert state.status.tolist() == [0]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", SLIDING)
def test_logits_with_eviction_are_those_of_transformers(name, steps):
    logits, state = in_steps(name, STEPS[steps], KvWindowPolicy.on())
    assert_is_oracle(logits, name)
    # Fault 8: positions come from what was consumed, not from the rows of a sliding layer.
    assert state.length.tolist() == [40]
    rows = {layer.key.shape[2] for layer in state.layers}
    assert rows == ({20} if name == "mistral" else {20, 48})  # window 8, slack 4, 8 appended


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_continuation_is_that_of_transformers(name):
    config, params = read_config(name), tiny_params(name)
    state = init_state(config, capacity=56, max_append=40, kv_window=KvWindowPolicy.on())
    logits, state = forward(params, prompt(name), state, config=config)

    @jax.jit
    def decode(logits, state):
        def one(carry, _):
            logits, state = carry
            token = jnp.argmax(logits, -1)
            logits, state = forward(params, token[:, None], state, config=config)
            return (logits, state), token[0]

        return jax.lax.scan(one, (logits, state), length=16)[1]

    np.testing.assert_array_equal(decode(logits, state), load_oracle(name).greedy_ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_weights_stay_close(name):
    config = read_config(name)
    expected = load_oracle(name).logits
    rounded = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim > 1 else leaf, tiny_params(name)
    )
    low = dataclasses.replace(config, dtype="bfloat16")
    logits, _ = forward(rounded, prompt(name), config=low, logits="all")
    error = np.abs(np.asarray(logits[0]) - expected)
    assert error.mean() < 0.05 * expected.std()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_residual_stream_past_the_range_of_float16_stays_finite(dtype):
    config = dataclasses.replace(read_config("gemma3_text"), dtype=dtype)
    params = jax.tree.map(
        lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, tiny_params("gemma3_text")
    )
    layers = tuple(layer.replace(mlp_post_norm=layer.mlp_post_norm * 1e5) for layer in params.layers)
    logits, _ = forward(params.replace(layers=layers), prompt("gemma3_text"), config=config, logits="all")
    assert np.isfinite(np.asarray(logits)).all()
