"""Slots: the states of several conversations side by side, within a byte budget.

A slot is an immutable value and the store's map is replaced whole, so nothing is ever half-written: a turn
that fails leaves the slot it started from. A turn opens a slot (plan, then truncate, restore or refill),
extends the state it gets, and saves.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import jax
import numpy as np

from jaxinfer.prefix.checkpoint_ring import CheckpointRing, RingCheckpoint
from jaxinfer.prefix.content import ContentSpan, first_unlike
from jaxinfer.prefix.entry import PrefixEntry, PrefixMetadata
from jaxinfer.prefix.planner import PrefixRestorePlan, PrefixReuseMode, plan_prefix_reuse
from jaxinfer.prefix.tokens import longest_common_token_prefix
from jaxinfer.state import Checkpoint, DecodeState, restore, rollback_floor, snapshot, truncate


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """What one conversation holds between turns.

    Attributes:
      entry: the tokens that the state represents, and of which model.
      state: of batch 1.
      ring: checkpoints of the state's history.
    """

    entry: PrefixEntry
    state: DecodeState
    ring: CheckpointRing[Checkpoint]

    @property
    def size_bytes(self) -> int:
        """Logical bytes of the state and its checkpoints."""
        return state_bytes(self.state) + self.ring.size_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class OpenTurn:
    """A turn between `PrefixStore.open` and `PrefixStore.save`.

    Attributes:
      slot: its name.
      plan: what of the slot's state the prompt keeps.
      state: at `plan.suffix_start`, to be extended.
      donate: whether `state` belongs to the turn alone; if not, it shares buffers with the slot, and the
        first step must leave it valid.
      before: the slot as it was when the turn opened, None where it was empty or had to make room.
      boundary: a checkpoint of that slot's state at its end, where the state cannot simply be truncated.
    """

    slot: Hashable
    plan: PrefixRestorePlan
    state: DecodeState
    donate: bool
    before: Slot | None
    boundary: RingCheckpoint[Checkpoint] | None


class PrefixStore:
    """Conversation states by slot name, least recently used dropped first.

    Args:
      budget_bytes: the most bytes that all slots together hold between turns. During a turn that keeps an
        old state the new one comes on top, where both fit the budget; else the slot is emptied first.
    """

    def __init__(self, budget_bytes: int):
        if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes < 1:
            raise ValueError(
                f"PrefixStore(budget_bytes=...) must be an int of at least 1; got {budget_bytes!r}"
            )
        self.budget_bytes = budget_bytes
        self._slots: Mapping[Hashable, Slot] = types.MappingProxyType({})  # least recently used first

    @property
    def slots(self) -> Mapping[Hashable, Slot]:
        """The slots as they are now; the mapping never changes, the next turn makes another."""
        return self._slots

    @property
    def size_bytes(self) -> int:
        """Bytes that the slots hold together."""
        return sum(slot.size_bytes for slot in self._slots.values())

    def open(
        self,
        slot: Hashable,
        metadata: PrefixMetadata,
        token_ids: Sequence[int],
        *,
        fresh: Callable[[], DecodeState],
        content: Iterable[ContentSpan] = (),
    ) -> OpenTurn:
        """Returns a turn whose state is ready for the rest of the prompt.

        Args:
          metadata: what the state for this prompt is made with.
          token_ids: the whole prompt, not empty and checked.
          fresh: makes an empty state of batch 1, for a refill.
          content: the prompt's images, as in `plan_prefix_reuse`.

        Raises:
          ValueError: a fresh state alone is larger than the budget; nothing has been computed then.
        """
        content = tuple(content)
        held = self._slots.get(slot)
        entry, lengths = (None, ()) if held is None else (held.entry, held.ring.lengths)
        plan = plan_prefix_reuse(entry, metadata, token_ids, lengths, content=content)
        if held is None or plan.mode is PrefixReuseMode.FULL_REFILL:
            if held is not None and not self._both_fit(held):
                self.drop(slot)  # before the new state takes its memory
                held = None
            state = fresh()
            self._check_fits(slot, state_bytes(state))
            return OpenTurn(slot, plan, state, True, held, None)
        boundary = None
        if plan.mode is PrefixReuseMode.EXACT_APPEND:
            state = held.state
            if _needs_checkpoints(state) or (content and state.rope_delta is not None):
                boundary = ring_checkpoint(snapshot(state))
        elif plan.mode is PrefixReuseMode.TRUNCATE_APPEND:
            state = truncate(held.state, plan.reusable_len)
        else:
            state = restore(held.state, held.ring.at(plan.reusable_len).payload)
        donate = not self._both_fit(held)
        if donate:
            # The slot's buffers are about to be given up; what the turn needs of it is kept in `before`.
            self.drop(slot)
        return OpenTurn(slot, plan, state, donate, held, boundary)

    def save(
        self,
        turn: OpenTurn,
        metadata: PrefixMetadata,
        token_ids: Sequence[int],
        state: DecodeState,
        *,
        max_checkpoints: int,
        taken: Iterable[RingCheckpoint[Checkpoint]] = (),
        content: Iterable[ContentSpan] = (),
    ) -> None:
        """Puts what a turn made of its state into the slot; other slots make room where they must.

        Args:
          token_ids: exactly the tokens that `state` represents.
          max_checkpoints: of the slot's ring when it starts empty.
          taken: checkpoints taken in this turn.

        Raises:
          ValueError: the slot alone is larger than the budget; it is empty then.
        """
        floor = rollback_floor(state)
        entry = PrefixEntry(
            slot=turn.slot,
            metadata=metadata,
            token_ids=tuple(token_ids),
            represented_len=len(token_ids),
            recurrent_len=len(token_ids) if floor is None else None,
            rollback_floor=None if floor is None else int(np.asarray(floor)[0]),
            content=tuple(content),
        )
        before, mode = turn.before, turn.plan.mode
        if before is None or mode is PrefixReuseMode.FULL_REFILL:
            spare = max(0, self.budget_bytes - state_bytes(state))
            ring, common = CheckpointRing[Checkpoint](max_checkpoints, spare), 0
        else:
            ring = before.ring
            common = longest_common_token_prefix(before.entry.token_ids, entry.token_ids)
            unlike = first_unlike(before.entry.content, entry.content)
            common = common if unlike is None else min(common, unlike)
        ring = ring.after_save(
            mode,
            common_prefix_len=common,
            new_represented_len=len(token_ids),
            boundary=turn.boundary,
            taken=taken,
        )
        self.put(turn.slot, Slot(entry, state, ring))

    def put(self, name: Hashable, slot: Slot) -> None:
        """Fills a slot; other slots make room where they must.

        Raises:
          ValueError: the slot alone is larger than the budget; it is empty then.
        """
        others = {other: s for other, s in self._slots.items() if other != name}
        try:
            self._check_fits(name, slot.size_bytes)
        except ValueError:
            self._slots = types.MappingProxyType(others)
            raise
        room = self.budget_bytes - slot.size_bytes
        for other in list(others):
            excess = sum(s.size_bytes for s in others.values()) - room
            if excess <= 0:
                break
            thinned = _thinned(others[other], excess)
            if thinned is None:
                del others[other]
            else:
                others[other] = thinned
        self._slots = types.MappingProxyType({**others, name: slot})

    def drop(self, slot: Hashable) -> None:
        """Empties a slot; nothing happens when it is empty."""
        self._slots = types.MappingProxyType({name: s for name, s in self._slots.items() if name != slot})

    def _check_fits(self, name: Hashable, size_bytes: int) -> None:
        if size_bytes > self.budget_bytes:
            raise ValueError(
                f"PrefixStore(budget_bytes={self.budget_bytes}) cannot hold slot {name!r} of "
                f"{size_bytes} bytes; raise the budget or lower the capacity"
            )

    def _both_fit(self, held: Slot) -> bool:
        return self.size_bytes + state_bytes(held.state) <= self.budget_bytes


def _thinned(slot: Slot, excess_bytes: int) -> Slot | None:
    """Returns the slot with `excess_bytes` less of checkpoints, None where it has not so many."""
    if slot.ring.size_bytes < excess_bytes:
        return None
    ring = slot.ring.thinned(slot.ring.size_bytes - excess_bytes, slot.entry.represented_len)
    return dataclasses.replace(slot, ring=ring)


def _needs_checkpoints(state: DecodeState) -> bool:
    """True where some length of the state's history may be beyond a truncation."""
    floor = rollback_floor(state)
    return floor is None or bool(np.asarray(floor)[0] > 0)


def ring_checkpoint(checkpoint: Checkpoint) -> RingCheckpoint[Checkpoint]:
    """Returns a checkpoint of batch 1 as a member of a ring."""
    return RingCheckpoint(int(np.asarray(checkpoint.length)[0]), checkpoint.size_bytes, checkpoint)


def state_bytes(state: DecodeState) -> int:
    """Returns the logical bytes of every array of a state."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
