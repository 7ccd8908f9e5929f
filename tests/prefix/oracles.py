"""Slow models of prefix reuse, straight from their meaning: they look at every length there is.

Plain data in, plain data out. A history is tokens and image spans; what a column *is* decides whether two
columns are the same, and every length is tried as the place to go on from.
"""

from __future__ import annotations

import itertools
import math

Span = tuple[int, int, str | None]


def column_kinds(tokens: list[int], spans: list[Span], side: str) -> list[tuple]:
    """What each column stands for: its token, and the image it belongs to, told apart by side if unknown."""
    kinds = []
    for column, token in enumerate(tokens):
        image = next((span for span in spans if span[0] <= column < span[1]), None)
        if image is not None and image[2] is None:
            image = (side, *image)
        kinds.append((token, image))
    return kinds


def shared_len(old: list[tuple], new: list[tuple]) -> int:
    """Leading columns that are the same."""
    shared = 0
    while shared < min(len(old), len(new)) and old[shared] == new[shared]:
        shared += 1
    return shared


def cuts_run(boundary: int, kinds: list[tuple]) -> bool:
    """True when the columns on both sides of the boundary belong to images."""
    return 0 < boundary < len(kinds) and kinds[boundary - 1][1] is not None and kinds[boundary][1] is not None


def best_boundary(
    old_tokens: list[int],
    old_spans: list[Span],
    new_tokens: list[int],
    new_spans: list[Span],
    *,
    checkpoints: list[int],
    recurrent_len: int | None,
    floor: int | None,
    whole_runs: bool,
) -> tuple[str, int, int]:
    """Returns the mode, the length kept and the shared length, from all legal ways to go on.

    At each length shorter than the prompt, within the shared columns, that cuts no run: the live state
    serves where it ends there and its recurrent part does too; where it can be cut back that far; or where
    a checkpoint lies there. The deepest wins; at one length in that order.
    """
    old = column_kinds(old_tokens, old_spans, "old")
    new = column_kinds(new_tokens, new_spans, "new")
    shared = shared_len(old, new)
    ways = []
    for boundary in range(1, len(new)):
        if boundary > shared or (whole_runs and (cuts_run(boundary, old) or cuts_run(boundary, new))):
            continue
        if boundary == len(old) and recurrent_len in (None, len(old)):
            ways.append((boundary, 3, "EXACT_APPEND"))
        if floor is not None and boundary >= floor:
            ways.append((boundary, 2, "TRUNCATE_APPEND"))
        if boundary in checkpoints:
            ways.append((boundary, 1, "REPLAY_FROM_CHECKPOINT"))
    if not ways:
        return "FULL_REFILL", 0, shared
    boundary, _, mode = max(ways)
    return mode, boundary, shared


def expected_replay(lengths: tuple[int, ...], history_len: int) -> float:
    """Tokens that a diverging prompt replays, averaged over where it diverges.

    A prompt that shares p to p + 1 tokens of the history has the weight of 1 / (history_len + 1 - x) over
    that step; it replays from the last checkpoint at or before p.
    """
    total = 0.0
    for shared in range(history_len):
        start = max((length for length in lengths if length <= shared), default=0)
        total += (shared - start) * math.log((history_len + 1 - shared) / (history_len - shared))
    return total


def least_expected_replay(lengths: tuple[int, ...], count: int, history_len: int) -> float:
    """The best that any `count` of the checkpoints can do."""
    return min(expected_replay(chosen, history_len) for chosen in itertools.combinations(lengths, count))
