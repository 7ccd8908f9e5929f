"""The planner against a slow model that tries every length, on small histories."""

from __future__ import annotations

import itertools

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from jaxinfer.prefix import PrefixReuseMode, plan_prefix_reuse
from tests.prefix import oracles
from tests.prefix.builders import BIDIRECTIONAL, METADATA, entry_of

TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=9) | st.lists(st.integers(0, 1), max_size=2)
LENGTHS = st.integers(0, 10)


@st.composite
def contents(draw, num_tokens: int) -> list[oracles.Span]:
    """Images side by side or apart, in any order, some without a digest."""
    edges = sorted(draw(st.sets(st.integers(0, num_tokens), max_size=6)))
    spans = [
        (start, end, draw(st.sampled_from(["A", "B", "A", "B", None])))
        for start, end in itertools.pairwise(edges)
        if draw(st.booleans())
    ]
    return draw(st.permutations(spans))


@st.composite
def cases(draw) -> dict:
    """An entry, a prompt that often begins like it, and what the state offers."""
    old = draw(TOKENS)
    shared = draw(st.sampled_from([len(old), len(old) - 1, len(old) - 2, len(old) // 2]))
    new = old[: max(0, shared)] + draw(TOKENS)[: draw(st.integers(0, 5))]
    old_spans = draw(contents(len(old)))
    inherited = [span for span in old_spans if span[1] <= len(new)]  # what a next turn mostly holds
    new_spans = inherited if draw(st.integers(0, 3)) else draw(contents(len(new)))
    can_truncate = draw(st.booleans())
    return {
        "old": old,
        "old_spans": old_spans,
        "new": new,
        "new_spans": new_spans,
        "checkpoints": draw(st.lists(LENGTHS, max_size=4)),
        "floor": draw(LENGTHS) if can_truncate else None,
        "recurrent_len": None if can_truncate else draw(st.none() | st.integers(0, len(old))),
        "whole_runs": draw(st.booleans()),
    }


@settings(max_examples=600, deadline=None)
@given(cases())
@example(  # a run of the entry that begins where a run of the prompt ends
    {
        "old": [0] * 6,
        "old_spans": [(1, 3, "A"), (3, 6, "A")],
        "new": [0] * 5,
        "new_spans": [(1, 3, "A")],
        "checkpoints": [3],
        "floor": 1,
        "recurrent_len": None,
        "whole_runs": True,
    }
)
def test_the_plan_is_the_best_of_all_legal_boundaries(case):
    mode, kept, shared = oracles.best_boundary(
        case["old"],
        case["old_spans"],
        case["new"],
        case["new_spans"],
        checkpoints=case["checkpoints"],
        recurrent_len=case["recurrent_len"],
        floor=case["floor"],
        whole_runs=case["whole_runs"],
    )
    metadata = BIDIRECTIONAL if case["whole_runs"] else METADATA
    entry = entry_of(
        case["old"],
        metadata=metadata,
        recurrent_len=case["recurrent_len"],
        rollback_floor=case["floor"],
        content=case["old_spans"],
    )
    plan = plan_prefix_reuse(entry, metadata, case["new"], case["checkpoints"], content=case["new_spans"])
    event(mode)
    assert (plan.mode.name, plan.reusable_len, plan.shared_prefix_len) == (mode, kept, shared)
    assert plan.suffix_start == kept
    assert plan.suffix_len == len(case["new"]) - kept
    assert plan.old_represented_len == len(case["old"])
    assert plan.checkpoint_len == (kept if plan.mode is PrefixReuseMode.REPLAY_FROM_CHECKPOINT else None)
