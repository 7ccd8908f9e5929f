"""Which part of a slot's state the next prompt may keep: token ids and metadata in, a plan out.

A *boundary* is a length at which the prompt can go on from a state. The planner looks for the deepest
one that is surely right and that leaves at least one token to prefill; where it is not sure it plans a
refill. It owns no buffers and reads no arrays: carrying a plan out is the slot store's work.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Iterable, Sequence

from jaxinfer.prefix.content import as_content, cut_run_start, first_unlike, image_runs
from jaxinfer.prefix.entry import PrefixEntry, PrefixMetadata
from jaxinfer.prefix.tokens import as_int_tuple, common_len


class PrefixReuseMode(enum.Enum):
    """How the state for the prompt is made.

    Attributes:
        FULL_REFILL: from nothing.
        EXACT_APPEND: the live state, as it is, then the suffix.
        TRUNCATE_APPEND: the live state cut back to `reusable_len`, then the suffix.
        REPLAY_FROM_CHECKPOINT: the state restored from the checkpoint at `checkpoint_len`, then the suffix.
    """

    FULL_REFILL = "full_refill"
    EXACT_APPEND = "exact_append"
    TRUNCATE_APPEND = "truncate_append"
    REPLAY_FROM_CHECKPOINT = "replay_from_checkpoint"


class PrefixReason(enum.Enum):
    """What decided the plan: that the prompt extends the entry, or what kept it from doing so.

    The name is for programs, the value is the explanation. The reasons from `TOKENS_DIFFER` on go with a
    shallower boundary where there was a usable one, and with a refill where there was none.
    """

    EXTENDS_ENTRY = "the prompt extends the represented tokens"
    NO_ENTRY = "the slot holds nothing"
    METADATA_DIFFERS = "the state was made with something else"
    EMPTY_PROMPT = "the prompt is empty"
    NOTHING_SHARED = "the first column already differs"
    TOKENS_DIFFER = "the tokens differ before the end of the represented ones"
    CONTENT_DIFFERS = "an image differs, or has no digest to be compared by"
    NO_SUFFIX = "the state already represents the whole prompt, which leaves no token to prefill"
    RECURRENT_LAGS = "the recurrent snapshot is shorter than the represented tokens"
    CUTS_IMAGE_RUN = "the represented tokens end inside an image run, which must be prefilled whole"


@dataclasses.dataclass(frozen=True)
class PrefixRestorePlan:
    """What to do with a slot's state so that it can take the prompt.

    Attributes:
        mode: how the state is made.
        reason: what decided it.
        shared_prefix_len: leading columns in which entry and prompt agree, tokens and images; 0 without
            an entry and where the metadata differs.
        reusable_len: length of the state that is kept; 0 for a refill.
        suffix_len: prompt tokens left to prefill; at least 1 but for an empty prompt.
        old_represented_len: tokens the entry represents; 0 without an entry.
        checkpoint_len: the checkpoint to restore, None unless the mode is REPLAY_FROM_CHECKPOINT.
        differing_fields: metadata fields that differ, for METADATA_DIFFERS.
        detail: why no deeper boundary was taken, in words; empty where `reason` says it all.
    """

    mode: PrefixReuseMode
    reason: PrefixReason
    shared_prefix_len: int
    reusable_len: int
    suffix_len: int
    old_represented_len: int
    checkpoint_len: int | None = None
    differing_fields: tuple[str, ...] = ()
    detail: str = ""

    @property
    def suffix_start(self) -> int:
        """First prompt column to prefill: where the kept state ends."""
        return self.reusable_len

    @property
    def explanation(self) -> str:
        """One line for people: mode, lengths, reason and detail."""
        kept = f"keeps {self.reusable_len} of {self.old_represented_len}, prefills {self.suffix_len}"
        return f"{self.mode.value}: {kept}; {self.reason.value}" + (
            f" ({self.detail})" if self.detail else ""
        )


def checkpoint_survives_save(length: int, common_prefix_len: int, new_represented_len: int) -> bool:
    """Returns True iff a checkpoint still lies in the history that was saved, strictly before its end.

    That is `0 < length <= common_prefix_len` and `length < new_represented_len`.

    Args:
        length: tokens that the checkpoint represents.
        common_prefix_len: columns in which the history before and the one saved now agree.
        new_represented_len: tokens of the history saved now; at its very end the live state serves.
    """
    return 0 < length <= common_prefix_len and length < new_represented_len


def plan_prefix_reuse(
    entry: PrefixEntry | None,
    metadata: PrefixMetadata,
    new_token_ids: Sequence[int],
    checkpoint_lens: Iterable[int] = (),
    *,
    content: Iterable[tuple[int, int, Hashable | None]] = (),
) -> PrefixRestorePlan:
    """Returns how much of the entry's state the new prompt may keep, and why not more.

    In order: no entry, other metadata, an empty prompt or nothing shared is a refill. A prompt that
    extends all the represented tokens is appended, where the recurrent snapshot (if any) is as long. Else
    the deeper of a truncation and a checkpoint, the truncation on a tie; else a refill. For an entry that
    represents `[1, 2, 3, 4, 5]`::

        prompt               entry                      plan
        [1, 2, 3, 4, 5, 6]   any                        append at 5
        [1, 2, 3, 4, 5]      rollback_floor=0           truncate to 4
        [1, 2, 9]            rollback_floor=0           truncate to 2
        [1, 2, 9]            checkpoints at 1 and 3     replay from 1
        [1, 2, 9]            neither                    refill

    Where some layer reads image runs in both directions (`PrefixMetadata.keeps_image_runs_whole`) no
    boundary lies strictly inside a run of the prompt or of the entry.

    Args:
        entry: what the slot holds; None when it is empty.
        metadata: what the state for the prompt would be made with.
        new_token_ids: the whole prompt.
        checkpoint_lens: lengths of the checkpoints at hand, in any order; only those within the shared
            prefix and before the end of the prompt are considered.
        content: `(start, end, digest)` of the prompt's images, end exclusive, digest None where unknown.

    Raises:
        ValueError: `metadata` is not a PrefixMetadata, or ids, lengths or content are malformed.
    """
    if not isinstance(metadata, PrefixMetadata):
        raise ValueError(f"plan_prefix_reuse(metadata=...) must be a PrefixMetadata; got {metadata!r}")
    tokens = as_int_tuple(new_token_ids, "plan_prefix_reuse(new_token_ids=...)")
    checkpoints = as_int_tuple(checkpoint_lens, "plan_prefix_reuse(checkpoint_lens=...)")
    spans = as_content(content, len(tokens), "plan_prefix_reuse(content=...)")
    if entry is None:
        return _refill(PrefixReason.NO_ENTRY, len(tokens), 0)
    fields = entry.metadata.differing_fields(metadata)
    if fields:
        plan = _refill(PrefixReason.METADATA_DIFFERS, len(tokens), entry.represented_len)
        return dataclasses.replace(plan, differing_fields=fields, detail=f"differing: {', '.join(fields)}")
    if not tokens:
        return _refill(PrefixReason.EMPTY_PROMPT, 0, entry.represented_len)

    shared_tokens = common_len(entry.token_ids, tokens)
    unlike = first_unlike(entry.content, spans)
    shared = shared_tokens if unlike is None else min(shared_tokens, unlike)
    if shared == 0:
        return _refill(PrefixReason.NOTHING_SHARED, len(tokens), entry.represented_len)
    runs = (*image_runs(spans), *image_runs(entry.content)) if metadata.keeps_image_runs_whole else ()

    blocker = _append_blocker(entry, len(tokens), shared, shared_tokens, runs)
    if blocker is None:
        return PrefixRestorePlan(
            mode=PrefixReuseMode.EXACT_APPEND,
            reason=PrefixReason.EXTENDS_ENTRY,
            shared_prefix_len=shared,
            reusable_len=shared,
            suffix_len=len(tokens) - shared,
            old_represented_len=entry.represented_len,
        )
    deepest = min(shared, len(tokens) - 1)  # a boundary at the end of the prompt leaves no suffix
    return _shallower_plan(entry, blocker, len(tokens), shared, _Boundaries(deepest, runs), checkpoints)


def _refill(reason: PrefixReason, prompt_len: int, old_represented_len: int) -> PrefixRestorePlan:
    """Returns a refill that shares nothing."""
    return PrefixRestorePlan(
        mode=PrefixReuseMode.FULL_REFILL,
        reason=reason,
        shared_prefix_len=0,
        reusable_len=0,
        suffix_len=prompt_len,
        old_represented_len=old_represented_len,
    )


def _append_blocker(
    entry: PrefixEntry,
    prompt_len: int,
    shared: int,
    shared_tokens: int,
    runs: tuple[tuple[int, int], ...],
) -> PrefixReason | None:
    """Returns why the prompt cannot simply be appended to the live state; None where it can."""
    if shared == prompt_len:
        return PrefixReason.NO_SUFFIX
    if shared < entry.represented_len:
        return PrefixReason.CONTENT_DIFFERS if shared < shared_tokens else PrefixReason.TOKENS_DIFFER
    if entry.recurrent_len is not None and entry.recurrent_len < entry.represented_len:
        return PrefixReason.RECURRENT_LAGS
    if cut_run_start(shared, runs) is not None:
        return PrefixReason.CUTS_IMAGE_RUN
    return None


@dataclasses.dataclass(frozen=True)
class _Boundaries:
    """The boundaries that tokens and images allow: from 1 to `deepest`, never strictly inside a run."""

    deepest: int
    runs: tuple[tuple[int, int], ...]

    def allow(self, length: int) -> bool:
        return 0 < length <= self.deepest and cut_run_start(length, self.runs) is None

    def truncation_target(self) -> int:
        """The deepest allowed boundary, 0 where there is none."""
        target = self.deepest
        # A run of the entry may begin inside one of the prompt's, so one step need not be enough.
        while (start := cut_run_start(target, self.runs)) is not None:
            target = start
        return target


def _shallower_plan(
    entry: PrefixEntry,
    blocker: PrefixReason,
    prompt_len: int,
    shared: int,
    boundaries: _Boundaries,
    checkpoint_lens: tuple[int, ...],
) -> PrefixRestorePlan:
    """Returns the deeper of a truncation and a replay, else a refill that reports the shared length."""
    target = boundaries.truncation_target()
    floor = entry.rollback_floor
    truncated = target if floor is not None and target >= max(1, floor) else 0
    replayed = max((length for length in checkpoint_lens if boundaries.allow(length)), default=0)
    kept = max(truncated, replayed)
    if kept == 0:
        mode = PrefixReuseMode.FULL_REFILL
    elif kept == truncated:
        mode = PrefixReuseMode.TRUNCATE_APPEND
    else:
        mode = PrefixReuseMode.REPLAY_FROM_CHECKPOINT
    detail = "" if kept == boundaries.deepest else _why_not_deeper(boundaries, target, floor, checkpoint_lens)
    return PrefixRestorePlan(
        mode=mode,
        reason=blocker,
        shared_prefix_len=shared,
        reusable_len=kept,
        suffix_len=prompt_len - kept,
        old_represented_len=entry.represented_len,
        checkpoint_len=kept if mode is PrefixReuseMode.REPLAY_FROM_CHECKPOINT else None,
        detail=detail,
    )


def _why_not_deeper(
    boundaries: _Boundaries, target: int, floor: int | None, checkpoint_lens: tuple[int, ...]
) -> str:
    """Says in words what kept the boundary below the deepest one that tokens alone would allow."""
    parts = []
    if target < boundaries.deepest:
        parts.append(f"length {boundaries.deepest} would cut an image run that starts at {target}")
    if floor is None:
        parts.append("the live state cannot be truncated")
    elif target < max(1, floor):
        parts.append(f"the live state cannot be truncated to {target}, only to {max(1, floor)} or more")
    usable = sum(map(boundaries.allow, set(checkpoint_lens)))
    parts.append(f"{usable} of {len(set(checkpoint_lens))} checkpoints are usable")
    return "; ".join(parts)
