"""A conversation with a hybrid: its state cannot be truncated, so turns append or replay from checkpoints."""

import pytest

import jaxinfer as ji
from jaxinfer.testing import tiny_model

MODEL = tiny_model("qwen3_5", seed=5)
OPTIONS = {"max_new_tokens": 6}
CAPACITY = 256


def session():
    return ji.ChatSession(MODEL, capacity=CAPACITY)


def cold(chat, question):
    """The answer of a session that holds the same conversation and no state."""
    other = session()
    other.turns = chat.turns
    reply = other.send(question, **OPTIONS)
    assert reply.plan.mode is ji.PrefixReuseMode.FULL_REFILL
    return reply.generation.token_ids


def test_turns_append_an_edit_replays_and_a_broken_turn_leaves_no_trace():
    chat = session()
    chat.send("One river?", **OPTIONS)
    expected = cold(chat, "Two more?")
    second = chat.send("Two more?", **OPTIONS)
    assert second.plan.mode is ji.PrefixReuseMode.EXACT_APPEND
    assert second.generation.token_ids == expected

    def interrupt(chunk):
        raise KeyboardInterrupt

    turns = chat.turns
    with pytest.raises(KeyboardInterrupt):
        chat.send("And a lake?", stream=interrupt, **OPTIONS)
    assert chat.turns == turns
    expected = cold(chat, "And a sea?")
    third = chat.send("And a sea?", **OPTIONS)
    assert third.plan.mode is ji.PrefixReuseMode.EXACT_APPEND
    assert third.generation.token_ids == expected

    chat.undo()
    expected = cold(chat, "And a hill?")
    again = chat.send("And a hill?", **OPTIONS)  # from the checkpoint before the question undone
    assert again.plan.mode is ji.PrefixReuseMode.REPLAY_FROM_CHECKPOINT
    assert again.generation.token_ids == expected

    edited = chat.edit(1, "Three lakes?", **OPTIONS)
    assert edited.plan.mode is ji.PrefixReuseMode.REPLAY_FROM_CHECKPOINT
    assert edited.plan.reusable_len > 0
    assert len(chat.turns) == 2
    chat.turns = chat.turns[:1]
    assert edited.generation.token_ids == cold(chat, "Three lakes?")


def test_a_session_fits_the_budget_that_it_is_priced_with():
    residency = ji.KvResidency.from_config(
        MODEL.config, MODEL.kv_window, dtype=MODEL.config.dtype, checkpoints=3
    )
    chat = session()
    for question in ("a?", "b?", "c?", "d?", "e?"):
        chat.send(question, **OPTIONS)
    assert len(chat.seat.store.slots[0].ring.checkpoints) == 3
    assert chat.seat.store.size_bytes == residency.allocated_bytes(CAPACITY)


def test_rows_of_a_batch_are_generated_as_if_alone():
    prompts = ["The sea is", "a", "Once upon a time there was"]
    together = ji.generate(MODEL, prompts, max_new_tokens=8)
    for prompt, generation in zip(prompts, together, strict=True):
        (alone,) = ji.generate(MODEL, prompt, max_new_tokens=8)
        assert generation.token_ids == alone.token_ids
