"""`forward` is a function: jit, vmap, grad and scan compose with it, and states are values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer as ji
from jaxinfer.testing import random_params, tiny_config

CONFIG = tiny_config("llama")
PARAMS = random_params(CONFIG, seed=1)
TOKENS = np.random.RandomState(0).randint(0, CONFIG.vocab_size, (2, 12)).astype(np.int32)


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def test_vmap_over_prompts_equals_a_batch():
    batched, _ = ji.forward(PARAMS, TOKENS, config=CONFIG, logits="all")
    one = functools.partial(ji.forward, config=CONFIG, logits="all")
    mapped = jax.vmap(lambda tokens: one(PARAMS, tokens[None])[0][0])(TOKENS)
    np.testing.assert_allclose(mapped, batched, atol=2e-5)


def test_vmap_over_states_equals_a_batch():
    def extend(state, tokens):
        _, state = ji.forward(PARAMS, tokens[None, :8], state, config=CONFIG)
        logits, state = ji.forward(PARAMS, tokens[None, 8:], state, config=CONFIG)
        return logits[0], state.length[0]

    state = ji.init_state(CONFIG, capacity=16)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    logits, lengths = jax.vmap(extend)(states, TOKENS)
    expected, _ = ji.forward(PARAMS, TOKENS, config=CONFIG)
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    assert lengths.tolist() == [12, 12]


def test_gradient_of_a_loss_agrees_with_a_finite_difference():
    def loss(params):
        logits, _ = ji.forward(params, TOKENS[:, :-1], config=CONFIG, logits="all")
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), TOKENS[:, 1:, None], axis=-1)
        return -jnp.mean(picked)

    gradient = jax.grad(loss)(PARAMS)
    random = np.random.RandomState(3)
    direction = jax.tree.map(lambda leaf: random.randn(*leaf.shape).astype(np.float32) * 0.1, PARAMS)
    slope = sum(
        float(jnp.vdot(a, b))
        for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
    )

    def loss_at(size):
        return float(loss(jax.tree.map(lambda leaf, move: leaf + size * move, PARAMS, direction)))

    assert abs(slope) > 1e-2
    assert slope == pytest.approx((loss_at(1e-3) - loss_at(-1e-3)) / 2e-3, rel=2e-2)


def test_scan_over_decode_steps_equals_one_pass():
    def step(state, token):
        logits, state = ji.forward(PARAMS, token[:, None], state, config=CONFIG)
        return state, logits

    state = ji.init_state(CONFIG, batch=2, capacity=16)
    state, logits = jax.lax.scan(step, state, TOKENS.T)
    expected, _ = ji.forward(PARAMS, TOKENS, config=CONFIG, logits="all")
    np.testing.assert_allclose(jnp.swapaxes(logits, 0, 1), expected, atol=2e-5)
    assert state.length.tolist() == [12, 12]


@pytest.mark.parametrize("policy", [ji.KvWindowPolicy.off(), ji.KvWindowPolicy.on()])
def test_old_state_is_unchanged_by_a_step_and_can_be_extended_twice(policy):
    config = tiny_config("gemma3")
    params = random_params(config, seed=2)
    state = ji.init_state(config, batch=2, capacity=64, max_append=16, kv_window=policy)
    _, state = ji.forward(params, TOKENS, state, config=config)
    before = jax.tree.map(np.array, state)
    first, _ = ji.forward(params, TOKENS[:, :3], state, config=config)
    second, _ = ji.forward(params, TOKENS[:, :3], state, config=config)
    np.testing.assert_array_equal(first, second)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, state))


def test_fresh_state_can_be_donated():
    donating = jax.jit(
        functools.partial(ji.forward, config=CONFIG), static_argnames=("logits",), donate_argnames=("state",)
    )
    logits, state = donating(PARAMS, TOKENS, ji.init_state(CONFIG, batch=2, capacity=16))
    logits, state = donating(PARAMS, TOKENS[:, :1], state)
    assert state.length.tolist() == [13, 13]
    assert np.isfinite(logits).all()
