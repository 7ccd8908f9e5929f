"""Timed steps compute what the library computes, and come back to where they began."""

import jax.numpy as jnp
import pytest

import jaxinfer as ji
from jaxinfer.measuring.compiles import CompileLedger
from jaxinfer.measuring.speed import DecodeClock, time_prefill
from jaxinfer.testing import tiny_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def greedy(model):
    [answer] = ji.generate(model, [PROMPT], max_new_tokens=5)
    return list(answer.token_ids)


def test_the_token_after_a_timed_prefill_is_the_greedy_one(model, greedy):
    seconds, token = time_prefill(model, PROMPT, runs=2)
    assert seconds > 0
    assert token == greedy[0]


def test_every_timed_decode_gives_the_tokens_that_generate_does(model, greedy):
    clock = DecodeClock(model, PROMPT, batch=2, steps=4)
    for _ in range(2):
        seconds, tokens = clock.time(4)
        assert seconds > 0
        assert tokens == greedy[1:]


def test_more_steps_than_one_device_call_takes_are_refused(model):
    with pytest.raises(ValueError, match=r"DecodeClock\(steps=\.\.\.\) must be in 1\.\.64; got 65"):
        DecodeClock(model, PROMPT, batch=1, steps=65)


def test_a_ledger_counts_the_programs_of_its_time_alone():
    import jax

    ledger = CompileLedger()
    jax.jit(lambda x: x * 3 + 1)(jnp.arange(7)).block_until_ready()
    ledger.close()
    counted = ledger.record()["programs"]
    assert counted >= 1
    jax.jit(lambda x: x * 5 + 2)(jnp.arange(7)).block_until_ready()
    assert ledger.record()["programs"] == counted
