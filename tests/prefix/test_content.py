"""Images behind equal placeholder ids, and boundaries near image runs: rules 18, 20a and 28, fault 12."""

from __future__ import annotations

import dataclasses

import pytest

from jaxinfer.prefix import PrefixReason, PrefixReuseMode, plan_prefix_reuse
from jaxinfer.spans import MaskPolicy
from tests.prefix.builders import BIDIRECTIONAL, METADATA, entry_of

REFILL = PrefixReuseMode.FULL_REFILL
APPEND = PrefixReuseMode.EXACT_APPEND
TRUNCATE = PrefixReuseMode.TRUNCATE_APPEND
REPLAY = PrefixReuseMode.REPLAY_FROM_CHECKPOINT

IMG = 99
#        0  1  2    3    4    5    6  7
HISTORY = [1, 2, IMG, IMG, IMG, IMG, 3, 4]


def plan_of(entry, prompt, checkpoints=(), *, content=()):
    """Plans with the entry's own metadata."""
    return plan_prefix_reuse(entry, entry.metadata, prompt, checkpoints, content=content)


# Rule 28: tokens stand for content


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([(2, 6, "A")], [(2, 6, "B")]),
        ([(2, 6, None)], [(2, 6, None)]),
        ([(2, 6, "A")], [(2, 6, None)]),
        ([(2, 6, "A")], []),
        ([], [(2, 6, "A")]),
        ([(2, 6, "A")], [(2, 5, "A")]),
        ([(2, 4, "A"), (4, 6, "B")], [(2, 6, "A")]),
    ],
    ids=["other image", "no digests", "one digest", "image gone", "image new", "other extent", "one for two"],
)
def test_rule_28_reuse_ends_where_an_image_that_is_not_surely_equal_starts(old, new):
    plan = plan_of(entry_of(HISTORY, rollback_floor=0, content=old), [*HISTORY, 5], content=new)
    assert (plan.mode, plan.shared_prefix_len, plan.reusable_len) == (TRUNCATE, 2, 2)
    assert plan.reason is PrefixReason.CONTENT_DIFFERS


def test_rule_28_an_equal_image_at_the_same_place_is_shared():
    entry = entry_of(HISTORY, content=[(2, 6, "A")])
    plan = plan_of(entry, [*HISTORY, 5], content=[(2, 6, "A")])
    assert (plan.mode, plan.shared_prefix_len) == (APPEND, 8)


def test_rule_28_the_same_image_one_column_on_is_not_the_same_place():
    old, new = [1, IMG, IMG, IMG], [1, IMG, IMG, IMG, IMG]
    plan = plan_of(entry_of(old, rollback_floor=0, content=[(1, 3, "A")]), new, content=[(2, 4, "A")])
    assert plan.shared_prefix_len == 1


def test_rule_28_a_second_image_limits_reuse_and_the_first_does_not():
    tokens = [1, IMG, IMG, 2, IMG, IMG, 3]
    entry = entry_of(tokens, rollback_floor=0, content=[(1, 3, "A"), (4, 6, "B")])
    plan = plan_of(entry, tokens, content=[(4, 6, "C"), (1, 3, "A")])
    assert (plan.mode, plan.reusable_len) == (TRUNCATE, 4)


def test_rule_28_an_image_past_the_shared_tokens_changes_nothing():
    entry = entry_of([1, 2, 3, IMG, IMG], rollback_floor=0, content=[(3, 5, "A")])
    plan = plan_of(entry, [1, 2, 9, IMG, IMG], content=[(3, 5, "B")])
    assert (plan.shared_prefix_len, plan.reason) == (2, PrefixReason.TOKENS_DIFFER)


def test_rule_28_an_unknown_image_at_the_very_start_shares_nothing():
    entry = entry_of([IMG, IMG, 1], rollback_floor=0, content=[(0, 2, None)])
    plan = plan_of(entry, [IMG, IMG, 1, 2], content=[(0, 2, None)])
    assert (plan.mode, plan.reason) == (REFILL, PrefixReason.NOTHING_SHARED)


def test_rule_28_placeholder_ids_without_content_spans_are_plain_text():
    plan = plan_of(entry_of(HISTORY), [*HISTORY, 5])
    assert (plan.mode, plan.shared_prefix_len) == (APPEND, 8)


@pytest.mark.parametrize("metadata", [METADATA, BIDIRECTIONAL], ids=["causal", "bidirectional"])
def test_fault_12_image_b_after_image_a_with_the_same_text_reuses_up_to_the_image(metadata):
    entry = entry_of(HISTORY, metadata=metadata, rollback_floor=0, content=[(2, 6, "A")])
    plan = plan_of(entry, HISTORY, content=[(2, 6, "B")])
    assert (plan.mode, plan.reusable_len, plan.suffix_start) == (TRUNCATE, 2, 2)


# Rules 18, 20a and 28: boundaries inside image runs


@pytest.mark.parametrize(
    ("mask_policy", "whole"),
    [
        ("causal", False),
        ("CAUSAL", False),
        (MaskPolicy.CAUSAL, False),
        ((MaskPolicy.CAUSAL, MaskPolicy.CAUSAL), False),
        (frozenset({"causal"}), False),
        ("vision_bidirectional", True),
        (MaskPolicy.VISION_BIDIRECTIONAL, True),
        ((MaskPolicy.CAUSAL, MaskPolicy.VISION_BIDIRECTIONAL), True),
        pytest.param(frozenset(MaskPolicy), True, id="every policy"),
        ("some other policy", True),
        (None, True),
        ((), True),
    ],
    ids=str,
)
def test_rule_28_runs_are_kept_whole_unless_every_layer_is_known_to_be_causal(mask_policy, whole):
    metadata = dataclasses.replace(METADATA, mask_policy=mask_policy)
    assert metadata.keeps_image_runs_whole is whole


def test_rule_20a_a_causal_model_may_be_cut_inside_an_image():
    entry = entry_of(HISTORY, rollback_floor=0, content=[(2, 6, "A")])
    plan = plan_of(entry, HISTORY[:6], content=[(2, 6, "A")])
    assert (plan.mode, plan.reusable_len) == (TRUNCATE, 5)


def test_rule_20a_a_target_inside_a_run_is_lowered_to_its_start():
    entry = entry_of(HISTORY, metadata=BIDIRECTIONAL, rollback_floor=0, content=[(2, 6, "A")])
    plan = plan_of(entry, HISTORY[:6], content=[(2, 6, "A")])
    assert (plan.mode, plan.reusable_len, plan.reason) == (TRUNCATE, 2, PrefixReason.NO_SUFFIX)
    assert "would cut an image run that starts at 2" in plan.explanation


@pytest.mark.parametrize(("floor", "mode"), [(2, TRUNCATE), (3, REFILL), (5, REFILL)])
def test_rule_20a_a_lowered_target_is_held_against_the_floor(floor, mode):
    entry = entry_of(HISTORY, metadata=BIDIRECTIONAL, rollback_floor=floor, content=[(2, 6, "A")])
    assert plan_of(entry, HISTORY[:6], content=[(2, 6, "A")]).mode is mode


@pytest.mark.parametrize("kept", [2, 6, 7])
def test_rule_20a_the_start_and_the_end_of_a_run_are_boundaries(kept):
    entry = entry_of(HISTORY, metadata=BIDIRECTIONAL, rollback_floor=0, content=[(2, 6, "A")])
    content = [(2, 6, "A")] if kept >= 6 else []
    plan = plan_of(entry, [*HISTORY[:kept], 50], content=content)
    assert (plan.mode, plan.reusable_len) == (TRUNCATE, kept)


def test_rule_20a_checkpoints_inside_a_run_are_ignored():
    entry = entry_of(HISTORY, metadata=BIDIRECTIONAL, recurrent_len=8, content=[(2, 6, "A")])
    for checkpoints, kept in (([3, 4, 5], 0), ([1, 3, 4, 5], 1), ([2, 5], 2), ([6, 5], 6)):
        plan = plan_of(entry, [*HISTORY[:7], 50], checkpoints, content=[(2, 6, "A")])
        assert (plan.mode, plan.reusable_len) == (REPLAY if kept else REFILL, kept)


def test_rule_20a_checkpoints_inside_an_image_serve_a_causal_model():
    entry = entry_of(HISTORY, recurrent_len=8, content=[(2, 6, "A")])
    plan = plan_of(entry, [*HISTORY[:7], 50], [3, 4], content=[(2, 6, "A")])
    assert (plan.mode, plan.checkpoint_len) == (REPLAY, 4)


@pytest.mark.parametrize(("metadata", "mode", "kept"), [(METADATA, APPEND, 4), (BIDIRECTIONAL, TRUNCATE, 2)])
def test_rule_18_a_boundary_inside_a_run_of_the_prompt_is_not_appended_to(metadata, mode, kept):
    entry = entry_of([1, 2, IMG, IMG], metadata=metadata, rollback_floor=0, content=[(2, 4, "A")])
    prompt = [1, 2, IMG, IMG, IMG, IMG, 3]
    plan = plan_of(entry, prompt, content=[(2, 4, "A"), (4, 6, "B")])
    assert (plan.mode, plan.reusable_len, plan.shared_prefix_len) == (mode, kept, 4)
    if mode is TRUNCATE:
        assert plan.reason is PrefixReason.CUTS_IMAGE_RUN


def test_rule_18_a_cut_run_without_another_boundary_is_a_refill():
    entry = entry_of([1, 2, IMG, IMG], metadata=BIDIRECTIONAL, content=[(2, 4, "A")])
    plan = plan_of(entry, [1, 2, IMG, IMG, IMG, 3], [4], content=[(2, 4, "A"), (4, 5, "B")])
    assert (plan.mode, plan.reason) == (REFILL, PrefixReason.CUTS_IMAGE_RUN)


def test_rule_28_rows_of_a_run_that_the_prompt_ends_earlier_are_not_kept():
    # The entry's first image read forward into the second; in the prompt it has no neighbour.
    tokens = [1, IMG, IMG, IMG, IMG, 2]
    entry = entry_of(tokens, metadata=BIDIRECTIONAL, rollback_floor=0, content=[(1, 3, "A"), (3, 5, "B")])
    plan = plan_of(entry, [1, IMG, IMG, 7, 8], [3], content=[(1, 3, "A")])
    assert (plan.shared_prefix_len, plan.mode, plan.reusable_len) == (3, TRUNCATE, 1)


def test_rule_20a_the_m_rope_floor_is_the_callers_and_images_before_it_stay():
    entry = entry_of(HISTORY, rollback_floor=6, content=[(2, 6, "A")])
    assert plan_of(entry, [*HISTORY[:6], 50], content=[(2, 6, "A")]).reusable_len == 6
    assert plan_of(entry, [1, 2, 50]).mode is REFILL
