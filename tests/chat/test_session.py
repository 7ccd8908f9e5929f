"""What a conversation refuses, and that it is as it was after it has."""

import pytest

import jaxinfer as ji
from jaxinfer.loading.chat_template import ChatTemplateError
from jaxinfer.testing import tiny_config, tiny_model

MODEL = tiny_model("gemma3", seed=5, layers=tiny_config("gemma3").layers[-1:])
USER = {"role": "user", "content": "hi"}


def unchanged_after(session, error, match, **options):
    before = (session.messages, dict(session.seat.store.slots))
    with pytest.raises(error, match=match):
        session.send("hello", **options)
    assert (session.messages, dict(session.seat.store.slots)) == before


def test_a_system_message_goes_with_the_first_question_where_the_template_has_no_place_for_it():
    session = ji.ChatSession(MODEL, capacity=64, system="short")
    reply = session.send("hi", max_new_tokens=2)
    text = MODEL.tokenizer.decode(reply.generation.prompt_token_ids, skip_special_tokens=False)
    assert text == "<bos><start_of_turn>user\nshort\n\nhi<end_of_turn>\n<start_of_turn>model\n"
    assert [message["role"] for message in session.messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    "first", [USER, {"role": "oracle", "content": "hi"}], ids=["two users", "unknown role"]
)
def test_messages_that_the_template_refuses_leave_the_session_unchanged(first):
    session = ji.ChatSession(MODEL, capacity=64, messages=[first])
    unchanged_after(session, ChatTemplateError, "roles must alternate")


def test_an_answer_takes_what_the_capacity_leaves_and_more_is_refused():
    session = ji.ChatSession(MODEL, capacity=64)
    reply = session.send("hi", max_new_tokens=3)
    used = len(reply.generation.prompt_token_ids) + 3
    unchanged_after(session, ji.CapacityError, "exceed the capacity of 64; undo a turn", max_new_tokens=60)
    last = session.send("x")
    assert len(last.generation.prompt_token_ids) + len(last.generation.token_ids) <= 64
    assert last.plan.mode is ji.PrefixReuseMode.EXACT_APPEND
    assert last.plan.reusable_len == used


def test_there_is_nothing_to_undo_or_retry_before_the_first_turn():
    session = ji.ChatSession(MODEL, capacity=64)
    for refused in (session.undo, session.retry, lambda: session.edit(0, "x")):
        with pytest.raises(ValueError, match="the conversation has 0"):
            refused()
