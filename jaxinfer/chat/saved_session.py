"""A conversation as a record and arrays, and back: messages, ids, and the slot with its checkpoints."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.chat.images import image_records, read_records
from jaxinfer.chat.prompt import Message, Represented
from jaxinfer.chat.reply import Turn
from jaxinfer.chat.saved_files import SavedChatError, read_arrays, write_saved
from jaxinfer.chat.turn import Seat
from jaxinfer.prefix import CheckpointRing, ContentSpan, PrefixEntry, PrefixReuseMode, Slot
from jaxinfer.prefix.store import ring_checkpoint, state_bytes
from jaxinfer.state import Checkpoint, snapshot


class ChatMismatchError(SavedChatError):
    """A saved state belongs to something else than what it is loaded for.

    Attributes:
      fields: what differs, of `PrefixMetadata`, or "dtype".
      difference: what each was and is, in words.
    """

    def __init__(self, difference: str, fields: tuple[str, ...]):
        super().__init__(
            f"{difference}; ChatSession.load(messages_only=True) takes the messages alone and computes their "
            "state anew"
        )
        self.fields, self.difference = fields, difference


def write_session(path: Path, seat: Seat, preamble: Sequence[Message], turns: Sequence[Turn]) -> None:
    """Saves a conversation, with the seat's slot where that holds its state."""
    slot = seat.store.slots.get(seat.slot)
    if slot is not None and slot.entry.metadata.differing_fields(seat.metadata):
        slot = None  # another conversation's
    record = {
        "identity": identity(seat),
        "checkpoints": seat.checkpoints,
        "preamble": [dict(message) for message in preamble],
        "turns": [_turn_record(turn) for turn in turns],
        "images": image_records(image for turn in turns for image in turn.images),
        "entry": None if slot is None else _entry_record(slot.entry),
        "num_checkpoints": 0 if slot is None else len(slot.ring.checkpoints),
    }
    payloads = () if slot is None else (slot.state, *(held.payload for held in slot.ring.checkpoints))
    write_saved(path, record, [np.asarray(leaf) for leaf in jax.tree.leaves(payloads)])


def read_turns(record: Mapping[str, Any], seat: Seat) -> tuple[Turn, ...]:
    """Returns the turns of a record, their images as the seat's model takes them; without their ids where
    those are of another tokenizer.

    Raises:
      ImageError: there are images, and the seat's model reads none.
    """
    ours = record["identity"]["tokenizer_fingerprint"] == identity(seat)["tokenizer_fingerprint"]
    images = read_records(seat.model, record.get("images", {}))
    turns = []
    for turn in record["turns"]:
        ids = turn["token_ids"] if ours else None
        content = tuple((start, end, digest) for start, end, digest in turn.get("content", ()))
        represented = None if ids is None else Represented(turn["text"], tuple(ids), content)
        shown = tuple(images[key] for key in turn.get("images", ()))
        turns.append(Turn(turn["question"], turn["answer"], represented, None, shown))
    return tuple(turns)


def read_slot(path: Path, record: Mapping[str, Any], seat: Seat) -> Slot | None:
    """Returns the slot of a record as one of the seat's, None where none was saved.

    Raises:
      ChatMismatchError: the state does not belong to the seat's model, capacity or window policy.
      SavedChatError: the arrays are damaged.
    """
    check_identity(path, record, seat)
    saved = record["entry"]
    if saved is None:
        return None
    state_shape = jax.eval_shape(seat.fresh_state)
    shapes = (state_shape, *(jax.eval_shape(snapshot, state_shape),) * record["num_checkpoints"])
    arrays = read_arrays(path, record)
    wanted, structure = jax.tree.flatten(shapes)
    if [(leaf.shape, leaf.dtype) for leaf in wanted] != [(array.shape, array.dtype) for array in arrays]:
        raise SavedChatError(f"{path}: the saved arrays are not those of a state of this model")
    # Copies: the numpy arrays are not jax's to donate.
    state, *checkpoints = jax.tree.unflatten(structure, [jnp.array(array, copy=True) for array in arrays])
    entry = PrefixEntry(
        slot=seat.slot,
        metadata=seat.metadata,
        token_ids=tuple(saved["token_ids"]),
        represented_len=len(saved["token_ids"]),
        recurrent_len=saved["recurrent_len"],
        rollback_floor=saved["rollback_floor"],
        content=tuple(ContentSpan(*span) for span in saved["content"]),
    )
    if int(np.asarray(state.length)[0]) != entry.represented_len:
        raise SavedChatError(f"{path}: the saved state and its tokens are not of one length")
    spare = max(0, seat.store.budget_bytes - state_bytes(state))
    ring = CheckpointRing[Checkpoint](seat.checkpoints, spare).after_save(
        PrefixReuseMode.EXACT_APPEND,
        common_prefix_len=entry.represented_len,
        new_represented_len=entry.represented_len,
        taken=[ring_checkpoint(checkpoint) for checkpoint in checkpoints],
    )
    return Slot(entry, state, ring)


def check_identity(path: Path, record: Mapping[str, Any], seat: Seat) -> None:
    """Raises ChatMismatchError unless what was saved belongs to the seat's model and settings."""
    was, now = record["identity"], identity(seat)
    differing = tuple(name for name in now if name not in was or was[name] != now[name])
    if differing:
        parts = [f"{name} was {_brief(was.get(name))}, is {_brief(now[name])}" for name in differing]
        raise ChatMismatchError(f"{path} was saved with something else: {'; '.join(parts)}", differing)


def identity(seat: Seat) -> dict[str, Any]:
    """Returns what a state depends on besides its tokens, as plain JSON values by name."""
    metadata = seat.metadata
    fields = {field.name: getattr(metadata, field.name) for field in dataclasses.fields(metadata)}
    fields |= {"model_fingerprint": seat.model.fingerprint, "dtype": seat.model.config.weight_dtype}
    return json.loads(json.dumps({name: _plain(value) for name, value in fields.items()}))


def _plain(value: Any) -> Any:
    """Returns a hashable value as one of JSON, equal for equal values."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, frozenset):
        return sorted((_plain(item) for item in value), key=repr)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float) else repr(value)


def _turn_record(turn: Turn) -> dict[str, Any]:
    represented = turn.represented
    return {
        "question": dict(turn.question),
        "answer": dict(turn.answer),
        "text": None if represented is None else represented.text,
        "token_ids": None if represented is None else list(represented.token_ids),
        "content": [] if represented is None else [list(span) for span in represented.content],
        "images": [image.key for image in turn.images],
    }


def _entry_record(entry: PrefixEntry) -> dict[str, Any]:
    return {
        "token_ids": list(entry.token_ids),
        "recurrent_len": entry.recurrent_len,
        "rollback_floor": entry.rollback_floor,
        # A digest that JSON does not hold counts as unknown: no reuse past its image.
        "content": [
            [span.start, span.end, span.digest if isinstance(span.digest, str) else None]
            for span in entry.content
        ],
    }


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
