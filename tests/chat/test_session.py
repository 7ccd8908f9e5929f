"""What a conversation refuses and keeps, and what its next turn reuses."""

import dataclasses

import pytest

import jaxinfer as ji
from jaxinfer.loading.chat_template import ChatTemplate, ChatTemplateError
from jaxinfer.testing import tiny_config, tiny_model
from jaxinfer.testing.templates import CHATML_TEMPLATE

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


def cold_answer(model, session, question, **options):
    """What a session without a past state answers to the same messages."""
    fresh = ji.ChatSession(model, capacity=session.seat.capacity, messages=session.messages)
    return fresh.send(question, **options)


def test_a_stop_string_cut_from_the_text_is_not_represented_to_the_next_turn():
    session = ji.ChatSession(MODEL, capacity=96)
    whole = cold_answer(MODEL, session, "hi", max_new_tokens=8)
    stop = next(c for c in whole.text[1:] if c not in whole.text[0] and c.isprintable() and c.strip())
    reply = session.send("hi", max_new_tokens=8, stop=stop)
    assert reply.generation.stop == stop
    assert stop not in session.messages[-1]["content"]
    held = session.seat.store.slots[0].entry
    cold = cold_answer(MODEL, session, "and", max_new_tokens=4)
    warm = session.send("and", max_new_tokens=4)
    assert warm.generation.prompt_token_ids == cold.generation.prompt_token_ids
    assert warm.text == cold.text
    shared = ji.longest_common_token_prefix(held.token_ids, warm.generation.prompt_token_ids)
    assert len(reply.generation.prompt_token_ids) <= shared < held.represented_len
    assert warm.plan.reusable_len == shared


def test_a_template_that_rewrites_history_reuses_the_tokens_that_are_still_there():
    """As templates do that drop the thinking of earlier answers."""
    rewriting = ChatTemplate(
        CHATML_TEMPLATE.replace(
            "{{ message['content'] }}",
            "{{ message['content'][2:] if message['role'] == 'assistant' else message['content'] }}",
        )
    )
    model = dataclasses.replace(tiny_model("llama", seed=5), chat_template=rewriting)
    session = ji.ChatSession(model, capacity=128)
    first = session.send("hi", max_new_tokens=6)
    held = session.seat.store.slots[0].entry
    cold = cold_answer(model, session, "why", max_new_tokens=4)
    warm = session.send("why", max_new_tokens=4)
    assert warm.generation.token_ids == cold.generation.token_ids
    assert warm.generation.prompt_token_ids == cold.generation.prompt_token_ids
    shared = ji.longest_common_token_prefix(held.token_ids, warm.generation.prompt_token_ids)
    assert warm.plan.shared_prefix_len == shared
    assert warm.plan.reusable_len == shared >= len(first.generation.prompt_token_ids)
    assert warm.plan.mode is ji.PrefixReuseMode.TRUNCATE_APPEND


def test_an_answer_keeps_its_own_ids_in_the_next_prompt():
    session = ji.ChatSession(MODEL, capacity=96)
    first = session.send("hi", max_new_tokens=5)
    second = session.send("and", max_new_tokens=3)
    fed = (*first.generation.prompt_token_ids, *first.generation.token_ids)
    assert second.generation.prompt_token_ids[: len(fed)] == fed
    assert second.plan.mode is ji.PrefixReuseMode.EXACT_APPEND


def test_a_turn_that_breaks_off_leaves_the_session_as_it_was():
    session = ji.ChatSession(MODEL, capacity=96)
    session.send("hi", max_new_tokens=3)

    def break_off(chunk):
        raise KeyboardInterrupt("stop")

    unchanged_after(session, KeyboardInterrupt, "^stop$", max_new_tokens=3, stream=break_off)
    assert session.send("and", max_new_tokens=3).plan.mode is ji.PrefixReuseMode.EXACT_APPEND
