"""A conversation that was saved goes on as if it never had been, or says in one line why it cannot."""

import dataclasses
import importlib.util
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxinfer as ji
from jaxinfer.prefix import Slot
from jaxinfer.testing import tiny_config, tiny_model, toy_chat_template, toy_tokenizer

pytest.importorskip("orbax.checkpoint")

# One sliding layer, and questions so short that few shapes are compiled.
LAYERS = tiny_config("gemma3").layers[:1]
MODEL = tiny_model("gemma3", seed=5, layers=LAYERS, kv_window=ji.KvWindowPolicy.on())
SHORT = {"max_new_tokens": 3}


def conversation(*questions, **options):
    session = ji.ChatSession(MODEL, capacity=192, **options)
    for question in questions:
        session.send(question, **SHORT)
    return session


@dataclasses.dataclass(frozen=True)
class Original:
    """A conversation of two turns as it was saved, and the answer to its third question."""

    path: Path
    messages: tuple
    turns: tuple
    slot: Slot
    third: ji.Reply


def held(session):
    return session.seat.store.slots[session.seat.slot]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "conversation"
    session = conversation("a", "b")
    session.save(path)
    saved = path, session.messages, session.turns, held(session)
    return Original(*saved, session.send("c", logprobs=1, **SHORT))


@pytest.fixture
def saved(original, tmp_path):
    return shutil.copytree(original.path, tmp_path / "copy")


def test_everything_a_turn_depends_on_comes_back(original):
    loaded = ji.ChatSession.load(original.path, MODEL)
    slot = held(loaded)
    assert loaded.messages == original.messages
    assert [turn.represented for turn in loaded.turns] == [turn.represented for turn in original.turns]
    assert slot.entry == original.slot.entry
    assert slot.ring.lengths == original.slot.ring.lengths != ()
    assert jax.tree.structure(slot.state) == jax.tree.structure(original.slot.state)
    jax.tree.map(np.testing.assert_array_equal, slot.state, original.slot.state)
    for mine, theirs in zip(slot.ring.checkpoints, original.slot.ring.checkpoints, strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine.payload, theirs.payload)


def test_the_next_turn_appends_to_the_loaded_state_and_is_as_if_nothing_had_been_saved(original):
    reply = ji.ChatSession.load(original.path, MODEL).send("c", logprobs=1, **SHORT)
    assert reply.plan == original.third.plan
    assert reply.plan.mode is ji.PrefixReuseMode.EXACT_APPEND
    assert reply.plan.reusable_len == original.slot.entry.represented_len
    assert reply.generation == original.third.generation


def test_an_edit_after_loading_replays_from_a_loaded_checkpoint(original):
    loaded = ji.ChatSession.load(original.path, MODEL)
    reply = loaded.edit(1, "d", **SHORT)
    assert reply.plan.mode is ji.PrefixReuseMode.REPLAY_FROM_CHECKPOINT
    assert len(loaded.turns) == 2


def test_messages_alone_are_answered_after_a_refill(original):
    loaded = ji.ChatSession.load(original.path, MODEL, messages_only=True)
    assert loaded.messages == original.messages
    assert not loaded.seat.store.slots
    loaded.undo()
    reply = loaded.edit(0, "a", **SHORT)
    assert reply.plan.mode is ji.PrefixReuseMode.FULL_REFILL
    assert reply.text == original.turns[0].reply.text


def test_a_slot_of_a_given_store_is_filled_and_the_others_stay(original):
    other = conversation("a", store=ji.PrefixStore(10**8), slot="other")
    loaded = ji.ChatSession.load(original.path, MODEL, store=other.seat.store, slot="new", checkpoints=1)
    assert set(loaded.seat.store.slots) == {"other", "new"}
    assert held(loaded).entry.slot == "new"
    assert held(loaded).entry.token_ids == original.slot.entry.token_ids
    assert len(held(loaded).ring.checkpoints) == 1


def test_a_conversation_without_a_state_is_saved_as_messages(tmp_path):
    first = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    session = conversation(system="be brief", messages=first)
    session.save(tmp_path / "new")
    loaded = ji.ChatSession.load(tmp_path / "new", MODEL)
    assert loaded.messages == session.messages
    assert not loaded.seat.store.slots
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["conversation.json"]


OTHERS = {
    "model_fingerprint": {"fingerprint": "another"},
    "dtype": {"config": dataclasses.replace(MODEL.config, dtype="bfloat16")},
    "tokenizer_fingerprint": {"tokenizer": toy_tokenizer(adds_bos=False)},
    "chat_template_fingerprint": {"chat_template": toy_chat_template("chatml")},
    "kv_window": {"kv_window": ji.KvWindowPolicy.off()},
}


@pytest.mark.parametrize("field", OTHERS)
def test_another_model_is_refused_by_the_name_of_what_differs(original, field):
    other = dataclasses.replace(MODEL, **OTHERS[field])
    with pytest.raises(ji.ChatMismatchError, match=rf"{field} was .*, is .*messages_only=True") as caught:
        ji.ChatSession.load(original.path, other)
    assert field in caught.value.fields
    assert "\n" not in str(caught.value)
    loaded = ji.ChatSession.load(original.path, other, messages_only=True)
    assert loaded.messages == original.messages
    assert not loaded.seat.store.slots
    kept = [turn.represented is not None for turn in loaded.turns]
    assert kept == [field != "tokenizer_fingerprint"] * 2


def test_another_capacity_is_refused_and_the_messages_can_be_had(original):
    with pytest.raises(ji.ChatMismatchError, match="capacity was 192, is 256;"):
        ji.ChatSession.load(original.path, MODEL, capacity=256)
    loaded = ji.ChatSession.load(original.path, MODEL, capacity=256, messages_only=True)
    assert loaded.seat.capacity == 256


def test_saving_again_replaces_what_was_there(saved):
    loaded = ji.ChatSession.load(saved, MODEL)
    loaded.undo()
    loaded.save(saved)
    assert len(ji.ChatSession.load(saved, MODEL).turns) == 1
    assert len(list(saved.iterdir())) == 2


@pytest.mark.parametrize("broken", ["writing arrays", "renaming"])
def test_a_save_that_breaks_off_leaves_the_one_before(saved, monkeypatch, broken):
    import orbax.checkpoint

    writing = (orbax.checkpoint.PyTreeCheckpointer, "save")
    before = sorted(path.name for path in saved.iterdir())
    loaded = ji.ChatSession.load(saved, MODEL)
    loaded.undo()

    def fail(*args, **options):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(*(writing if broken == "writing arrays" else (os, "replace")), fail)
        with pytest.raises(OSError, match="disk full"):
            loaded.save(saved)
    assert sorted(path.name for path in saved.iterdir()) == before
    assert len(ji.ChatSession.load(saved, MODEL).turns) == 2


def test_a_first_save_that_was_killed_is_never_loaded(saved):
    (saved / "conversation.json").unlink()  # it is written last
    with pytest.raises(ji.SavedChatError, match="no conversation was saved here, or not to its end"):
        ji.ChatSession.load(saved, MODEL)
    conversation("a").save(saved)  # and the place can be used
    assert len(ji.ChatSession.load(saved, MODEL).turns) == 1


def refusal(path):
    with pytest.raises(ji.SavedChatError) as caught:
        ji.ChatSession.load(path, MODEL)
    assert not isinstance(caught.value, ji.ChatMismatchError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "digit", "format", "not json", "list"])
def test_a_damaged_record_is_one_line_that_names_it(saved, damage):
    path = saved / "conversation.json"
    text = path.read_text()
    record = json.loads(text)
    digit = text.index('"token_ids": [') + len('"token_ids": [')
    path.write_text(
        {
            "cut": text[: len(text) // 2],
            "digit": text[:digit] + "1" + text[digit:],
            "format": json.dumps({**record, "format": 99}),
            "not json": "hello",
            "list": "[]",
        }[damage]
    )
    assert str(path) in refusal(saved)


def test_damaged_arrays_are_one_line_that_names_the_file(original, tmp_path):
    files = [path.relative_to(original.path) for path in original.path.glob("state-*/**/*") if path.is_file()]
    assert files
    for number, name in enumerate(files):
        copy = shutil.copytree(original.path, tmp_path / str(number))
        data = (copy / name).read_bytes()
        half = len(data) // 2
        for damaged in (
            (data[:half], data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]) if data else (b"x",)
        ):
            (copy / name).write_bytes(damaged)
            assert f"{copy / name} is damaged" in refusal(copy)
        (copy / name).unlink()
        assert f"{copy / name} is missing" in refusal(copy)


def test_nothing_but_a_saved_conversation_is_replaced(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    session = conversation()
    for path in (tmp_path / "notes", tmp_path / "notes" / "mine.txt"):
        with pytest.raises(ValueError, match="holds something else; name a new directory"):
            session.save(path)
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"
    assert "no conversation was saved here" in refusal(tmp_path / "nowhere")


def test_without_orbax_the_error_says_what_to_install(original, tmp_path, monkeypatch):
    session = conversation("a")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "orbax" else found(name))
    with pytest.raises(ImportError, match=r"pip install 'jaxinfer\[checkpoint\]'"):
        session.save(tmp_path / "new")
    with pytest.raises(ImportError, match=r"pip install 'jaxinfer\[checkpoint\]'"):
        ji.ChatSession.load(original.path, MODEL)
    assert len(ji.ChatSession.load(original.path, MODEL, messages_only=True).turns) == 2
