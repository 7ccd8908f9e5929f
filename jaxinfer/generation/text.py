"""Generated ids as text: whole characters only, cut before the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StreamDecoder(Protocol):
    """Ids to text as they come; see `jaxinfer.loading.StreamDecoder`."""

    def push(self, token_ids: int | Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class RowText:
    """The text of one row as it grows.

    Text that might be the beginning of a stop string is held back until it is known not to be, so a stream
    never shows part of one. Not a value: it belongs to one call of `generate`.
    """

    def __init__(self, decoder: StreamDecoder, stop: Sequence[str]):
        self._decoder = decoder
        self._stop = tuple(stop)
        self._held = ""
        self.text = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """Returns the text that this id releases; sets `stopped_by` when it completes a stop string."""
        return self._release(self._decoder.push(token_id), final=False)

    def finish(self) -> str:
        """Returns what was held back; after a stop string, nothing."""
        return "" if self.stopped_by is not None else self._release(self._decoder.flush(), final=True)

    def _release(self, new: str, *, final: bool) -> str:
        pending = self._held + new
        matches = [(pending.find(stop), stop) for stop in self._stop if stop in pending]
        if matches:
            at, self.stopped_by = min(matches)
            pending, self._held = pending[:at], ""
        else:
            keep = 0 if final else _partial_match(pending, self._stop)
            self._held = pending[len(pending) - keep :]
            pending = pending[: len(pending) - keep]
        self.text += pending
        return pending


def _partial_match(text: str, stop: Sequence[str]) -> int:
    """Returns the length of the longest suffix of `text` that begins a stop string."""
    longest = 0
    for candidate in stop:
        for size in range(min(len(candidate) - 1, len(text)), longest, -1):
            if text.endswith(candidate[:size]):
                longest = size
                break
    return longest
