"""Steps inside a donated loop update their buffers in place: read from the compiled program."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.models import forward
from jaxinfer.state import DecodeState, KvWindowPolicy, init_state
from jaxinfer.testing import random_params, tiny_config

CONFIG = tiny_config("gemma3", window=400)
PARAMS = random_params(CONFIG)


def step(carry: tuple[jax.Array, DecodeState], _: None = None):
    token, state = carry
    logits, state = forward(PARAMS, token, state, config=CONFIG)
    return (jnp.argmax(logits, -1).astype(jnp.int32)[:, None], state), None


def decode_under_scan(token: jax.Array, state: DecodeState):
    return jax.lax.scan(step, (token, state), None, length=4)[0]


def decode_under_while(token: jax.Array, state: DecodeState):
    return jax.lax.while_loop(lambda c: jnp.any(c[1].length < 40), lambda c: step(c)[0], (token, state))


def decode_once(token: jax.Array, state: DecodeState):
    return step((token, state))[0]


@pytest.mark.parametrize(
    ("decode", "batch"), [(decode_under_scan, 1), (decode_under_while, 2), (decode_once, 1)]
)
def test_a_step_that_evicts_nothing_copies_no_buffer(decode, batch):
    # Numbers of rows that nothing else has, so that a line that makes a buffer can be told; and more than
    # attention reads at once: XLA fuses the update of a smaller buffer into its reader, and then copies it.
    state = init_state(CONFIG, batch=batch, capacity=777, max_append=13, kv_window=KvWindowPolicy.on())
    buffers = {layer.key.shape for layer in state.layers}
    assert {shape[2] for shape in buffers} == {613, 777}
    compiled = jax.jit(decode, donate_argnums=1).lower(jnp.zeros((batch, 1), jnp.int32), state).compile()
    program = compiled.as_text()
    assert "conditional(" in program  # the eviction
    for shape in buffers:
        made = re.escape(f"f32[{','.join(map(str, shape))}]")
        copies = re.findall(rf"= \(?{made}\S* (?:copy|copy-start|transpose)\(.*", program)
        assert not copies
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes >= state_bytes


def test_temporaries_of_a_step_with_eviction_do_not_grow_with_the_capacity():
    config = tiny_config("mistral", window=32)
    params = random_params(config)

    def temporaries(capacity):
        state = init_state(config, capacity=capacity, max_append=5, kv_window=KvWindowPolicy.on())
        lowered = jax.jit(forward, static_argnames="config").lower(
            params, jnp.zeros((1, 1), jnp.int32), state, config=config
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert 0 < temporaries(400) == temporaries(100)
