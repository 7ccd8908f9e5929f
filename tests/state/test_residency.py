"""The budget equals the allocation to the byte; rule 38 and fault 10."""

from __future__ import annotations

import jax
import pytest

import jaxinfer as ji
from jaxinfer.state.residency import _padded_size
from jaxinfer.testing import tiny_config

WINDOW = 4  # slack 2
MAX_APPEND = 3
POLICIES = (ji.KvWindowPolicy.off(), ji.KvWindowPolicy.on())
FAMILIES = ("llama", "mistral", "gemma3", "gemma3_image", "qwen3_vl", "qwen3_next", "qwen3_5")


def budget(config, policy, **options):
    return ji.KvResidency.from_config(config, policy, dtype=None, max_append=MAX_APPEND, **options)


def num_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("policy", POLICIES, ids=("off", "on"))
@pytest.mark.parametrize("family", FAMILIES)
def test_fault_10_allocated_bytes_are_those_of_the_real_arrays(family, policy):
    config = tiny_config(family, window=WINDOW)
    for capacity in (1, WINDOW - 1, WINDOW, WINDOW + 1, 10 * WINDOW):
        state = ji.init_state(config, batch=2, capacity=capacity, max_append=MAX_APPEND, kv_window=policy)
        for checkpoints in (0, 3):
            residency = budget(config, policy, batch=2, checkpoints=checkpoints)
            real = num_bytes(state) + checkpoints * num_bytes(ji.snapshot(state))
            allocated = residency.allocated_bytes(capacity)
            assert allocated == real
            assert residency.padded_bytes(capacity) >= allocated
            parts = residency.by_layer_kind(capacity)
            assert sum(part.state_bytes + part.checkpoint_bytes for part in parts) == allocated
            assert sum(part.num_layers for part in parts) == len(config.layers)


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_fault_10_a_window_longer_than_the_capacity_adds_no_rows(family):
    for capacity in (1, 5, 64):
        long = tiny_config(family, window=capacity + 1)
        on, off = (budget(long, policy).allocated_bytes(capacity) for policy in reversed(POLICIES))
        num_sliding = sum(layer.window is not None for layer in long.layers)
        assert on - off == 4 * num_sliding  # a base position, int32, a sliding layer
        assert off == budget(tiny_config(family, window=1), POLICIES[0]).allocated_bytes(capacity)


@pytest.mark.parametrize("policy", POLICIES, ids=("off", "on"))
@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_fault_10_max_capacity_inverts_allocated_bytes(family, policy):
    config = tiny_config(family, window=WINDOW, max_positions=100)
    residency = budget(config, policy, checkpoints=2)
    for capacity in (1, 7, 9, 40, 100):
        assert residency.max_capacity(residency.allocated_bytes(capacity)) >= capacity
    fixed = residency.allocated_bytes(1)
    for budget_bytes in (fixed, fixed + 1, 2 * fixed, 10**9):
        capacity = residency.max_capacity(budget_bytes)
        assert residency.allocated_bytes(capacity) <= budget_bytes
        assert capacity <= 100
    assert residency.max_capacity(10**9) == 100
    with pytest.raises(
        ValueError, match=rf"max_capacity\(budget_bytes={fixed - 1}\) must be at least {fixed}"
    ):
        residency.max_capacity(fixed - 1)


def test_rule_37_bytes_of_sliding_layers_follow_the_window_not_the_capacity():
    config = tiny_config("mistral", window=WINDOW)
    residency = budget(config, ji.KvWindowPolicy.on())
    assert residency.allocated_bytes(50) == residency.allocated_bytes(5000)
    off = budget(config, ji.KvWindowPolicy.off())
    assert off.allocated_bytes(5000) > 90 * off.allocated_bytes(50)


def test_rule_38_live_rows_of_a_model_with_both_kinds_of_layers():
    config = tiny_config("gemma3", window=WINDOW)  # sliding, sliding, full
    residency = budget(config, ji.KvWindowPolicy.on(), batch=2)
    row_bytes = 2 * 2 * config.num_kv_heads * config.head_dim * 4  # batch, key and value, float32
    assert residency.resident_bytes(20) == (20 + 2 * ji.KvWindow(WINDOW, 2).rows_after(20)) * row_bytes
    assert residency.peak_bytes(20) == (20 + 2 * (WINDOW + 2 + MAX_APPEND)) * row_bytes
    ring = budget(config, ji.KvWindowPolicy.on(), batch=2, checkpoints=3)
    assert ring.resident_bytes(20) - residency.resident_bytes(20) == 3 * 2 * (WINDOW - 1) * row_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_rule_38_resident_is_at_most_peak_is_at_most_full(family):
    config = tiny_config(family, window=WINDOW)
    on, off = (budget(config, policy) for policy in reversed(POLICIES))
    for positions in range(30):
        full = off.resident_bytes(positions)
        assert on.resident_bytes(positions) <= on.peak_bytes(positions) <= full
        assert off.peak_bytes(positions) == full
        if positions:
            assert on.peak_bytes(positions) <= on.allocated_bytes(positions)


@pytest.mark.parametrize(
    ("shape", "itemsize", "padded"),
    [  # argument sizes that the TPU compiler gives for row-major layouts
        ((1, 3, 100, 256), 2, 159744),
        ((3, 2, 4, 64), 4, 12288),
        ((3, 2, 1, 64), 4, 3072),
        ((1, 1, 3, 64), 2, 1024),
        ((5, 1000), 1, 8192),
        ((2, 100), 1, 512),
        ((3,), 4, 512),
        ((200,), 4, 1024),
        ((2000,), 4, 8192),
        ((3, 2, 0, 64), 4, 0),
    ],
)
def test_padding_is_that_of_tpu_tiles(shape, itemsize, padded):
    assert _padded_size(shape, itemsize) == padded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(dtype="float16"), "must be 'float32' or 'bfloat16'"),
        (dict(dtype=None, batch=0), r"batch=\.\.\."),
        (dict(dtype=None, max_append=0), r"max_append=\.\.\."),
        (dict(dtype=None, checkpoints=-1), r"checkpoints=\.\.\."),
    ],
)
def test_sizes_that_no_state_has_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ji.KvResidency.from_config(tiny_config("llama"), ji.KvWindowPolicy.off(), **options)
