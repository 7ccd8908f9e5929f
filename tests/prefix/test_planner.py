"""What of the last turn a prompt may keep: rules 15 to 24 and 27, and faults 11 and 13 to 16."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import sys
import time

import numpy as np
import pytest

import jaxinfer.prefix
from jaxinfer.prefix import (
    PrefixEntry,
    PrefixMetadata,
    PrefixReason,
    PrefixReuseMode,
    checkpoint_survives_save,
    plan_prefix_reuse,
)
from tests.prefix.builders import METADATA, entry_of

REFILL = PrefixReuseMode.FULL_REFILL
APPEND = PrefixReuseMode.EXACT_APPEND
TRUNCATE = PrefixReuseMode.TRUNCATE_APPEND
REPLAY = PrefixReuseMode.REPLAY_FROM_CHECKPOINT

OTHER_VALUES = {
    "model_fingerprint": "other weights",
    "tokenizer_fingerprint": "other vocabulary",
    "adapter_fingerprint": "adapter",
    "vocab_size": 101,
    "capacity": 64,
    "kv_dtype": "bfloat16",
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.25,
    "layer_pattern": "local,global",
    "chat_template_fingerprint": "other template",
    "mask_policy": "vision_bidirectional",
    "kv_window": "on",
}


def assert_refill(plan, reason, *, shared=0, prompt_len, old_len):
    """A refill keeps nothing whatever its reason (rule 22)."""
    assert (plan.mode, plan.reason) == (REFILL, reason)
    assert (plan.reusable_len, plan.suffix_start, plan.suffix_len) == (0, 0, prompt_len)
    assert (plan.shared_prefix_len, plan.old_represented_len, plan.checkpoint_len) == (shared, old_len, None)


# Rules 15 to 17 and 22: refills


def test_rule_15_no_entry_is_a_refill_of_the_whole_prompt():
    plan = plan_prefix_reuse(None, METADATA, [1, 2, 3])
    assert_refill(plan, PrefixReason.NO_ENTRY, prompt_len=3, old_len=0)


@pytest.mark.parametrize("field", OTHER_VALUES)
def test_rule_16_any_differing_metadata_field_is_a_refill_that_names_it(field):
    other = dataclasses.replace(METADATA, **{field: OTHER_VALUES[field]})
    plan = plan_prefix_reuse(entry_of([1, 2, 3], rollback_floor=0), other, [1, 2, 3, 4], [1, 2])
    assert_refill(plan, PrefixReason.METADATA_DIFFERS, prompt_len=4, old_len=3)
    assert plan.differing_fields == (field,)
    assert field in plan.explanation


def test_rule_16_every_metadata_field_is_compared():
    assert tuple(OTHER_VALUES) == tuple(field.name for field in dataclasses.fields(PrefixMetadata))
    plan = plan_prefix_reuse(entry_of([1]), dataclasses.replace(METADATA, **OTHER_VALUES), [1, 2])
    assert plan.differing_fields == tuple(OTHER_VALUES)


def test_rule_16_an_optional_rotary_factor_that_appears_is_a_difference():
    old = dataclasses.replace(METADATA, partial_rotary_factor=0.5)
    plan = plan_prefix_reuse(entry_of([1], metadata=old), METADATA, [1, 2])
    assert plan.differing_fields == ("partial_rotary_factor",)


def test_rule_27_metadata_that_does_not_equal_itself_matches_nothing():
    for unsure in (float("nan"), (1e6, float("nan"))):
        metadata = dataclasses.replace(METADATA, rope_theta=unsure)
        plan = plan_prefix_reuse(entry_of([1], metadata=metadata), metadata, [1, 2])
        assert plan.differing_fields == ("rope_theta",)


def test_fault_13_no_reuse_between_base_and_adapters_or_an_adapter_with_other_weights():
    adapters = [None, "adapter A", "adapter B", "adapter A, other weights"]
    for old in adapters:
        entry = entry_of([1, 2, 3], metadata=dataclasses.replace(METADATA, adapter_fingerprint=old))
        for new in adapters:
            plan = plan_prefix_reuse(
                entry, dataclasses.replace(METADATA, adapter_fingerprint=new), [1, 2, 3, 4]
            )
            assert plan.mode is (APPEND if old == new else REFILL)


def test_rule_17_an_empty_prompt_is_a_refill():
    plan = plan_prefix_reuse(entry_of([1, 2], rollback_floor=0), METADATA, [], [1])
    assert_refill(plan, PrefixReason.EMPTY_PROMPT, prompt_len=0, old_len=2)


@pytest.mark.parametrize("old", [[], [9, 2, 3]], ids=["empty entry", "first token differs"])
def test_rule_17_nothing_shared_is_a_refill(old):
    plan = plan_prefix_reuse(entry_of(old, rollback_floor=0), METADATA, [1, 2, 3], [1, 2])
    assert_refill(plan, PrefixReason.NOTHING_SHARED, prompt_len=3, old_len=len(old))


# Rules 18 to 20: appends


@pytest.mark.parametrize(
    "state", [{}, {"recurrent_len": 3}, {"rollback_floor": 0}, {"rollback_floor": 3}], ids=str
)
def test_rule_18_a_prompt_that_extends_the_entry_is_appended(state):
    plan = plan_prefix_reuse(entry_of([1, 2, 3], **state), METADATA, [1, 2, 3, 4, 5])
    assert (plan.mode, plan.reason) == (APPEND, PrefixReason.EXTENDS_ENTRY)
    assert (plan.shared_prefix_len, plan.reusable_len, plan.suffix_start, plan.suffix_len) == (3, 3, 3, 2)
    assert (plan.old_represented_len, plan.checkpoint_len) == (3, None)


def test_rule_19_an_equal_prompt_is_truncated_to_one_less():
    plan = plan_prefix_reuse(entry_of([1, 2, 3], rollback_floor=0), METADATA, [1, 2, 3])
    assert (plan.mode, plan.reason) == (TRUNCATE, PrefixReason.NO_SUFFIX)
    assert (plan.shared_prefix_len, plan.reusable_len, plan.suffix_len) == (3, 2, 1)


def test_rule_19_an_equal_prompt_replays_where_the_state_cannot_be_truncated():
    plan = plan_prefix_reuse(entry_of([1, 2, 3], recurrent_len=3), METADATA, [1, 2, 3], [1, 3])
    assert (plan.mode, plan.reason, plan.checkpoint_len) == (REPLAY, PrefixReason.NO_SUFFIX, 1)
    assert (plan.reusable_len, plan.suffix_len) == (1, 2)


def test_rule_19_an_equal_prompt_without_a_shallower_boundary_is_a_refill_with_the_true_shared_length():
    plan = plan_prefix_reuse(entry_of([1, 2, 3], recurrent_len=3), METADATA, [1, 2, 3], [3])
    assert_refill(plan, PrefixReason.NO_SUFFIX, shared=3, prompt_len=3, old_len=3)


@pytest.mark.parametrize("state", [{"rollback_floor": 0}, {"recurrent_len": 1}], ids=["full KV", "recurrent"])
def test_fault_14_the_same_prompt_of_one_token_leaves_nothing_to_keep(state):
    plan = plan_prefix_reuse(entry_of([7], **state), METADATA, [7], [1])
    assert_refill(plan, PrefixReason.NO_SUFFIX, shared=1, prompt_len=1, old_len=1)


def test_rule_20_a_lagging_recurrent_snapshot_is_not_appended_to():
    plan = plan_prefix_reuse(entry_of([1, 2, 3], recurrent_len=2), METADATA, [1, 2, 3, 4])
    assert_refill(plan, PrefixReason.RECURRENT_LAGS, shared=3, prompt_len=4, old_len=3)


def test_rule_20_a_lagging_recurrent_snapshot_goes_on_from_a_checkpoint():
    plan = plan_prefix_reuse(entry_of([1, 2, 3], recurrent_len=2), METADATA, [1, 2, 3, 4], [1, 2])
    assert (plan.mode, plan.reason, plan.checkpoint_len) == (REPLAY, PrefixReason.RECURRENT_LAGS, 2)


@pytest.mark.parametrize("recurrent_len", [0, 1, 2])
def test_fault_15_a_recurrent_snapshot_shorter_than_the_entry_is_refilled(recurrent_len):
    plan = plan_prefix_reuse(entry_of([1, 2, 3], recurrent_len=recurrent_len), METADATA, [1, 2, 3, 4])
    assert plan.mode is REFILL


# Rule 20a: truncations


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [([1, 2, 9, 9], 2), ([1, 2, 3, 4, 9], 4), ([1, 2, 3], 2), ([1, 2, 3, 4, 5], 4), ([1, 9], 1)],
    ids=str,
)
def test_rule_20a_a_truncation_keeps_what_is_shared_and_leaves_a_suffix(prompt, kept):
    plan = plan_prefix_reuse(entry_of([1, 2, 3, 4, 5], rollback_floor=0), METADATA, prompt)
    assert (plan.mode, plan.reusable_len, plan.suffix_start) == (TRUNCATE, kept, kept)
    assert (plan.suffix_len, plan.old_represented_len) == (len(prompt) - kept, 5)


@pytest.mark.parametrize(("floor", "mode"), [(0, TRUNCATE), (2, TRUNCATE), (3, TRUNCATE), (4, REFILL)])
def test_rule_20a_a_truncation_reaches_the_floor_and_never_below(floor, mode):
    plan = plan_prefix_reuse(entry_of([1, 2, 3, 4, 5], rollback_floor=floor), METADATA, [1, 2, 3, 9])
    assert (plan.mode, plan.reason) == (mode, PrefixReason.TOKENS_DIFFER)
    assert plan.reusable_len == (3 if mode is TRUNCATE else 0)


def test_rule_20a_evicted_windowed_rows_refuse_a_rollback_that_the_floor_forbids():
    # W=8, S=3 after 50 tokens: rows_after = 10, base 40, so the floor is 40 + 8 - 1.
    history = list(range(50))
    entry = entry_of(history, rollback_floor=47)
    assert plan_prefix_reuse(entry, METADATA, [*history[:46], 99]).mode is REFILL
    assert plan_prefix_reuse(entry, METADATA, [*history[:47], 99]).mode is TRUNCATE


def test_rule_20a_a_floor_does_not_stop_an_append():
    plan = plan_prefix_reuse(entry_of([1, 2, 3], rollback_floor=3), METADATA, [1, 2, 3, 4])
    assert plan.mode is APPEND


@pytest.mark.parametrize(
    ("floor", "checkpoints", "mode", "kept"),
    [
        (0, [1, 2], TRUNCATE, 3),
        (0, [3], TRUNCATE, 3),
        (4, [3], REPLAY, 3),
        (4, [2], REPLAY, 2),
        (None, [1, 2], REPLAY, 2),
        (4, [4, 5], REFILL, 0),
    ],
)
def test_rule_20a_the_deeper_of_truncation_and_replay_wins_and_a_tie_truncates(
    floor, checkpoints, mode, kept
):
    plan = plan_prefix_reuse(
        entry_of([1, 2, 3, 4, 5], rollback_floor=floor), METADATA, [1, 2, 3, 9], checkpoints
    )
    assert (plan.mode, plan.reusable_len) == (mode, kept)


# Rule 21: replays


def test_rule_21_the_deepest_usable_checkpoint_is_replayed_in_any_order():
    for checkpoints in ([1, 2, 3, 4], [4, 2, 1, 3], [3, 3, 1], (0, -1, 3, 4, 99), np.array([4, 3, 1])):
        plan = plan_prefix_reuse(
            entry_of([1, 2, 3, 4, 5], recurrent_len=5), METADATA, [1, 2, 3, 9], checkpoints
        )
        assert (plan.mode, plan.checkpoint_len, plan.reusable_len, plan.suffix_start) == (REPLAY, 3, 3, 3)
        assert plan.suffix_len == 1


def test_rule_21_a_checkpoint_at_the_end_of_the_prompt_would_leave_no_suffix():
    entry = entry_of([1, 2, 3, 4, 5], recurrent_len=5)
    assert plan_prefix_reuse(entry, METADATA, [1, 2, 3], [3]).mode is REFILL
    assert plan_prefix_reuse(entry, METADATA, [1, 2, 3], [3, 2]).checkpoint_len == 2


def test_rule_21_an_append_beats_a_replay_of_the_same_depth():
    plan = plan_prefix_reuse(entry_of([1, 2, 3], recurrent_len=3), METADATA, [1, 2, 3, 4], [1, 2, 3])
    assert (plan.mode, plan.checkpoint_len) == (APPEND, None)


def test_rule_21_checkpoints_outside_the_shared_prefix_are_no_use():
    plan = plan_prefix_reuse(entry_of([1, 2, 3, 4, 5], recurrent_len=5), METADATA, [1, 2, 9], [0, 3, 4, 5, 6])
    assert_refill(plan, PrefixReason.TOKENS_DIFFER, shared=2, prompt_len=3, old_len=5)


def test_fault_16_a_template_that_drops_thinking_shares_the_true_token_prefix():
    user, thinking, answer, question = [1, 10, 2], [50, 51, 52], [20, 21, 2], [11, 2]
    entry = entry_of(user + thinking + answer, recurrent_len=9)
    plan = plan_prefix_reuse(entry, METADATA, user + answer + question, [2, 5])
    assert (plan.shared_prefix_len, plan.mode, plan.checkpoint_len) == (3, REPLAY, 2)


# Rules 22 and 24: plans are values that explain themselves


def test_rule_22_every_plan_says_why_in_one_line():
    entry = entry_of([1, 2, 3, 4, 5], rollback_floor=4)
    plan = plan_prefix_reuse(entry, METADATA, [1, 2, 9], [4])
    assert plan.reason.name == "TOKENS_DIFFER"
    assert plan.explanation == (
        "full_refill: keeps 0 of 5, prefills 3; the tokens differ before the end of the represented ones "
        "(the live state cannot be truncated to 2, only to 4 or more; 0 of 1 checkpoints are usable)"
    )


def test_rule_22_every_reason_has_its_own_words():
    assert len({reason.value for reason in PrefixReason}) == len(list(PrefixReason))


def test_rule_24_planning_leaves_its_inputs_alone_and_repeats_itself():
    entry, prompt, checkpoints = entry_of([1, 2, 3], recurrent_len=3), [1, 2, 9], [2, 1]
    before = dataclasses.asdict(entry)
    plans = [plan_prefix_reuse(entry, METADATA, prompt, checkpoints) for _ in range(2)]
    assert plans[0] == plans[1]
    assert (dataclasses.asdict(entry), prompt, checkpoints) == (before, [1, 2, 9], [2, 1])


@pytest.mark.parametrize("module", ["planner", "entry", "tokens", "content", "checkpoint_ring"])
def test_rule_24_planning_imports_the_standard_library_and_itself_only(module):
    path = pathlib.Path(jaxinfer.prefix.__file__).with_name(f"{module}.py")
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module)
        elif isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
    assert imported
    for name in imported:
        assert name.startswith("jaxinfer.prefix.") or name.split(".")[0] in sys.stdlib_module_names


def test_entry_and_plan_are_hashable_values_whatever_held_the_ids():
    entries = {entry_of(ids) for ids in ([1, 2], (1, 2), np.array([1, 2], np.int32), range(1, 3))}
    assert len(entries) == 1
    plans = {plan_prefix_reuse(None, METADATA, ids) for ids in ([1, 2], np.array([1, 2]))}
    assert len(plans) == 1


def test_a_history_of_100k_tokens_is_planned_within_a_fifth_of_a_second():
    history = [i * 7919 % 150_000 for i in range(100_000)]
    entry = entry_of(history, rollback_floor=0)
    prompt = [*history[:99_500], -1, *history[99_501:]]
    start = time.process_time()
    plan = plan_prefix_reuse(entry, METADATA, prompt)
    assert plan.reusable_len == 99_500
    assert time.process_time() - start < 0.2  # about 8 ms


# Rule 23: survival


@pytest.mark.parametrize(
    ("length", "common", "new", "survives"),
    [
        (3, 5, 8, True),
        (5, 5, 8, True),
        (0, 5, 8, False),
        (6, 5, 8, False),
        (8, 8, 8, False),
        (1, 5, 0, False),
    ],
)
def test_rule_23_a_checkpoint_survives_inside_the_common_history_only(length, common, new, survives):
    assert checkpoint_survives_save(length, common, new) is survives


# Refused input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"represented_len": 2}, r"exactly the represented tokens; got 3 for represented_len=2"),
        ({"represented_len": 4}, r"exactly the represented tokens; got 3 for represented_len=4"),
        ({"represented_len": -3}, r"PrefixEntry\(represented_len=\.\.\.\) must be an int of at least 0"),
        ({"represented_len": None}, r"PrefixEntry\(represented_len=\.\.\.\) must be an int of at least 0"),
        ({"recurrent_len": 4}, r"recurrent_len=4\) must not lie beyond represented_len=3"),
        ({"recurrent_len": -1}, r"PrefixEntry\(recurrent_len=\.\.\.\) must be an int of at least 0"),
        ({"rollback_floor": -1}, r"PrefixEntry\(rollback_floor=\.\.\.\) must be an int of at least 0"),
        ({"rollback_floor": True}, r"PrefixEntry\(rollback_floor=\.\.\.\) must be an int of at least 0"),
        ({"recurrent_len": 3, "rollback_floor": 0}, r"must not set both"),
        ({"token_ids": [1, 2, 3.5]}, r"PrefixEntry\(token_ids=\.\.\.\) must be a flat sequence of ints"),
        ({"token_ids": np.ones((1, 3), int)}, r"PrefixEntry\(token_ids=\.\.\.\) must be a flat sequence"),
        ({"metadata": None}, r"PrefixEntry\(metadata=\.\.\.\) must be a PrefixMetadata"),
        ({"content": [(2, 4, "A")]}, r"start < end <= 3, the tokens they stand for; got \(2, 4\)"),
        ({"content": [(1, 1, "A")]}, r"start < end <= 3, the tokens they stand for; got \(1, 1\)"),
        ({"content": [(0, 2, "A"), (1, 3, "B")]}, r"must not overlap; got \(0, 2\) and \(1, 3\)"),
        ({"content": [(0, 2)]}, r"must hold \(start, end, digest\), the digest hashable; got \(0, 2\)"),
        ({"content": [(0, 2, [1])]}, r"must hold \(start, end, digest\), the digest hashable"),
        ({"content": [(-1, 2, "A")]}, r"PrefixEntry\(content=\.\.\.\) must be an int of at least 0; got -1"),
        ({"content": [(0, 2, "")]}, r"got an empty digest at \(0, 2\); pass None where it is unknown"),
    ],
    ids=str,
)
def test_an_entry_that_contradicts_itself_is_refused(arguments, message):
    fields = {"slot": 0, "metadata": METADATA, "token_ids": [1, 2, 3], "represented_len": 3}
    with pytest.raises(ValueError, match=message):
        PrefixEntry(**(fields | arguments))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "layer_pattern",
            ["local"],
            r"PrefixMetadata\(layer_pattern=\.\.\.\) must be a plain hashable value; got list",
        ),
        (
            "rope_theta",
            np.zeros(2),
            r"PrefixMetadata\(rope_theta=\.\.\.\) must be a plain hashable value; got ndarray",
        ),
        ("model_fingerprint", None, r"PrefixMetadata\(model_fingerprint=None\) must name the weights"),
        ("model_fingerprint", "", r"PrefixMetadata\(model_fingerprint=''\) must name the weights"),
    ],
)
def test_metadata_that_cannot_be_compared_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(METADATA, **{field: value})


@pytest.mark.parametrize("entry", [None, entry_of([1, 2])], ids=["no entry", "entry"])
def test_a_malformed_request_is_refused_whatever_the_slot_holds(entry):
    with pytest.raises(ValueError, match=r"plan_prefix_reuse\(new_token_ids=\.\.\.\) must be a flat"):
        plan_prefix_reuse(entry, METADATA, ["a"])
    with pytest.raises(ValueError, match=r"plan_prefix_reuse\(checkpoint_lens=\.\.\.\) must be a flat"):
        plan_prefix_reuse(entry, METADATA, [1], [0.5])
    with pytest.raises(ValueError, match=r"plan_prefix_reuse\(content=\.\.\.\) must hold spans with"):
        plan_prefix_reuse(entry, METADATA, [1], content=[(0, 2, "A")])
    with pytest.raises(ValueError, match=r"plan_prefix_reuse\(metadata=\.\.\.\) must be a PrefixMetadata"):
        plan_prefix_reuse(entry, "metadata", [1])
