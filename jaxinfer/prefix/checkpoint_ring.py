"""Which checkpoints of a slot's history to keep: a bounded, ascending ring thinned by coverage.

A checkpoint lets a later prompt that diverges from the history go on from the checkpoint's length instead
of from nothing. Where it will diverge is not known, but edits are likelier near the end, at every scale:
with a history of L tokens the chance that a prompt shares p of them falls as 1 / (L + 1 - p) with the
distance from the end. A set of checkpoints is as good as the number of tokens it expects to replay under
that law, and thinning drops, one by one, the checkpoint that adds least of it for the bytes it frees.
What remains lies dense near the end and grows sparser further back.

The ring is a value: every change returns a new one. Payloads are opaque.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from jaxinfer.prefix.planner import PrefixReuseMode, checkpoint_survives_save
from jaxinfer.prefix.tokens import as_length

Payload = TypeVar("Payload")


@dataclasses.dataclass(frozen=True, eq=False)  # payloads hold arrays, which do not compare to one bool
class RingCheckpoint(Generic[Payload]):
    """One checkpoint. Two are equal only when they are the same object.

    Attributes:
        length: tokens that it represents, at least 1.
        size_bytes: bytes that keeping it costs, at least 1.
        payload: whatever restores the state; never looked at here.
    """

    length: int
    size_bytes: int
    payload: Payload

    def __post_init__(self) -> None:
        for name in ("length", "size_bytes"):
            if as_length(getattr(self, name), f"RingCheckpoint({name}=...)") == 0:
                raise ValueError(f"RingCheckpoint({name}=...) must be at least 1; got 0")


@dataclasses.dataclass(frozen=True)
class CheckpointRing(Generic[Payload]):
    """The checkpoints of one slot: ascending, one a length, within both bounds.

    Attributes:
        max_count: the most checkpoints held; 0 holds none.
        budget_bytes: the most bytes they take together. A checkpoint larger than that is never held.
        checkpoints: those held, ascending by length. Leave it empty: `after_save` fills it.

    Raises:
        ValueError: a bound is negative, or the checkpoints are not ascending or exceed a bound.
    """

    max_count: int
    budget_bytes: int
    checkpoints: tuple[RingCheckpoint[Payload], ...] = ()

    def __post_init__(self) -> None:
        as_length(self.max_count, "CheckpointRing(max_count=...)")
        as_length(self.budget_bytes, "CheckpointRing(budget_bytes=...)")
        if any(a >= b for a, b in zip(self.lengths, self.lengths[1:], strict=False)):
            raise ValueError(f"CheckpointRing(checkpoints=...) must be ascending; got lengths {self.lengths}")
        if len(self.checkpoints) > self.max_count or self.size_bytes > self.budget_bytes:
            raise ValueError(
                f"CheckpointRing(checkpoints=...) must be at most {self.max_count}, of {self.budget_bytes} "
                f"bytes together; got {len(self.checkpoints)} of {self.size_bytes} bytes; "
                "add them with after_save"
            )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the checkpoints, ascending: what the planner takes as `checkpoint_lens`."""
        return tuple(checkpoint.length for checkpoint in self.checkpoints)

    @property
    def size_bytes(self) -> int:
        """Bytes that the checkpoints take together."""
        return sum(checkpoint.size_bytes for checkpoint in self.checkpoints)

    def at(self, length: int) -> RingCheckpoint[Payload]:
        """Returns the checkpoint of exactly `length` tokens.

        Raises:
            ValueError: there is none.
        """
        for checkpoint in self.checkpoints:
            if checkpoint.length == length:
                return checkpoint
        raise ValueError(
            f"CheckpointRing.at(length={length}) must be one of the lengths held; got {self.lengths}"
        )

    def after_save(
        self,
        mode: PrefixReuseMode,
        *,
        common_prefix_len: int,
        new_represented_len: int,
        boundary: RingCheckpoint[Payload] | None = None,
        taken: Iterable[RingCheckpoint[Payload]] = (),
    ) -> CheckpointRing[Payload]:
        """Returns the ring that goes with the history saved now.

        Checkpoints that survive (`checkpoint_survives_save`) are kept and the old boundary is promoted to
        one where it survives too. After a FULL_REFILL the ring starts empty, so neither is: the state
        they belong to is gone. Checkpoints taken in this turn are added. One a length: a newer one
        replaces an older one. Then the ring is thinned to its bounds.

        Args:
            mode: how this turn's state was made.
            common_prefix_len: columns in which the history before this turn and the one saved now agree,
                tokens and images.
            new_represented_len: tokens of the history saved now.
            boundary: a snapshot of the state as it was before this turn, None where there is none.
            taken: checkpoints of the state saved now. One at its very end is not kept: there the live
                state serves.

        Raises:
            ValueError: `mode` is not a PrefixReuseMode, `common_prefix_len` exceeds `new_represented_len`,
                or one of `taken` lies beyond it.
        """
        if not isinstance(mode, PrefixReuseMode):
            raise ValueError(f"CheckpointRing.after_save(mode=...) must be a PrefixReuseMode; got {mode!r}")
        saved_len = as_length(new_represented_len, "CheckpointRing.after_save(new_represented_len=...)")
        common = as_length(common_prefix_len, "CheckpointRing.after_save(common_prefix_len=...)")
        taken = tuple(taken)
        if common > saved_len or any(checkpoint.length > saved_len for checkpoint in taken):
            raise ValueError(
                f"CheckpointRing.after_save(new_represented_len={saved_len}) must cover what was saved; got "
                f"common_prefix_len={common} and taken lengths {[checkpoint.length for checkpoint in taken]}"
            )
        old = () if mode is PrefixReuseMode.FULL_REFILL else (*self.checkpoints, boundary)
        survivors = [
            c for c in old if c is not None and checkpoint_survives_save(c.length, common, saved_len)
        ]
        survivors += [c for c in taken if checkpoint_survives_save(c.length, saved_len, saved_len)]
        by_length = {checkpoint.length: checkpoint for checkpoint in survivors}
        ascending = tuple(by_length[length] for length in sorted(by_length))
        return dataclasses.replace(self, checkpoints=self._thinned(ascending, saved_len))

    def thinned(self, budget_bytes: int, history_len: int) -> CheckpointRing[Payload]:
        """Returns the ring with a smaller byte budget, for a history of `history_len` tokens."""
        smaller = dataclasses.replace(self, budget_bytes=budget_bytes, checkpoints=())
        kept = smaller._thinned(self.checkpoints, history_len)
        return dataclasses.replace(self, checkpoints=kept)

    def _thinned(
        self, ascending: tuple[RingCheckpoint[Payload], ...], history_len: int
    ) -> tuple[RingCheckpoint[Payload], ...]:
        """Returns the checkpoints that stay within both bounds."""
        kept = [checkpoint for checkpoint in ascending if checkpoint.size_bytes <= self.budget_bytes]
        while len(kept) > self.max_count or sum(c.size_bytes for c in kept) > self.budget_bytes:
            added = _added_replay([checkpoint.length for checkpoint in kept], history_len)
            # min takes the first of equals: on a tie the shallower checkpoint goes.
            drop = min(range(len(kept)), key=lambda i: added[i] / kept[i].size_bytes)
            del kept[drop]
        return tuple(kept)


def _added_replay(lengths: Sequence[int], history_len: int) -> list[float]:
    """Returns, for each checkpoint, the expected tokens of replay that dropping it alone would add.

    Without the checkpoint at `c`, a prompt that diverges between `c` and the next one replays from the
    one before: `c - previous` tokens more, times the chance of diverging there, which is the integral of
    1 / (history_len + 1 - p) from `c` to the next.
    """
    before = [0, *lengths[:-1]]
    after = [*lengths[1:], history_len]
    return [
        (length - previous) * math.log((history_len + 1 - length) / (history_len + 1 - following))
        for previous, length, following in zip(before, lengths, after, strict=True)
    ]
