"""How many rows a sliding layer keeps, and what turns eviction on; rules 31 to 34 and 36."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import LayerConfig, LayerKind, ModelConfig, RopeConfig
from jaxinfer.state.window import KV_WINDOW_ENV, KvWindow, KvWindowPolicy

WINDOWS = [KvWindow(w, s) for w in (1, 2, 3, 4, 7, 16) for s in (0, 1, 2, 3, 8)]
SIZES = st.integers(1, 12)
SLACKS = st.integers(0, 9)


def rows_step_by_step(window: int, slack: int, positions: int) -> int:
    """Appends one token at a time to a list of resident positions; one too many drops slack + 1 at once."""
    resident: list[int] = []
    for position in range(positions):
        resident.append(position)
        if len(resident) > window + slack:
            resident = resident[slack + 1 :]
    return len(resident)


def config_with_windows(*windows: int | None) -> ModelConfig:
    """A toy model, one layer a window; None is full attention."""
    rope = RopeConfig(theta=1e4, rotary_dim=4)
    layers = tuple(
        LayerConfig(LayerKind.SLIDING_ATTENTION if window else LayerKind.FULL_ATTENTION, window, rope=rope)
        for window in windows
    )
    return ModelConfig(
        family="toy",
        vocab_size=8,
        embed_dim=4,
        mlp_dim=4,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=4,
        layers=layers,
        max_positions=64,
        norm_eps=1e-6,
        softmax_scale=0.5,
    )


# Rule 33: the row count


def test_rule_33_a_worked_row_count():
    rows = [KvWindow(3, 2).rows_after(positions) for positions in range(13)]
    assert rows == [0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5, 3]


@pytest.mark.parametrize("kv_window", WINDOWS, ids=str)
def test_rule_33_rows_after_equals_the_step_by_step_simulation(kv_window):
    window, slack = kv_window.window, kv_window.slack
    for positions in range(3 * (window + slack) + 5):
        assert kv_window.rows_after(positions) == rows_step_by_step(window, slack, positions)


@pytest.mark.parametrize("kv_window", WINDOWS, ids=str)
def test_rule_33_rows_after_equals_the_modular_formula(kv_window):
    window, slack = kv_window.window, kv_window.slack
    for positions in range(window + slack + 1, 200):
        assert kv_window.rows_after(positions) == window + (positions - window - slack - 1) % (slack + 1)


@given(SIZES, SLACKS, st.integers(0, 2**31 - 1))
def test_rule_33_rows_stay_between_the_window_and_the_window_with_slack(window, slack, positions):
    rows = KvWindow(window, slack).rows_after(positions)
    assert min(positions, window) <= rows <= min(positions, window + slack)


@given(SIZES, SLACKS, st.lists(st.integers(0, 40), max_size=12))
@settings(deadline=None)
def test_rule_33_appends_of_any_size_keep_the_window_and_never_exceed_the_maximum(window, slack, appends):
    kv_window = KvWindow(window, slack)
    positions = rows = 0
    for append in appends:
        positions += append
        rows = min(kv_window.rows_after(positions), rows + append)
        assert min(positions, window) <= rows <= min(positions, kv_window.max_rows)


@pytest.mark.parametrize("kv_window", WINDOWS[::6], ids=str)
def test_rows_of_an_int32_array_equal_the_rows_of_each_int_eager_and_jitted(kv_window):
    positions = np.arange(60, dtype=np.int32).reshape(4, 15)
    expected = [[kv_window.rows_after(int(p)) for p in row] for row in positions]
    eager = kv_window.rows_after(jnp.asarray(positions))
    jitted = jax.jit(lambda window, p: window.rows_after(p), static_argnums=0)(kv_window, positions)
    for rows in (eager, jitted):
        assert rows.dtype == jnp.int32
        np.testing.assert_array_equal(rows, expected)


def test_rows_of_a_traced_scalar_work_inside_a_loop():
    kv_window = KvWindow(3, 2)
    last = jax.lax.fori_loop(
        0, 9, lambda _, carry: (carry[0] + 1, kv_window.rows_after(carry[0] + 1)), (0, 0)
    )
    assert [int(value) for value in last] == [9, 3]


def test_rows_near_the_largest_int32_do_not_overflow():
    top = 2**31 - 1
    assert int(KvWindow(512, 256).rows_after(jnp.int32(top))) == KvWindow(512, 256).rows_after(top)


def test_rows_after_takes_numpy_ints_and_keeps_strict_dtype_promotion():
    assert KvWindow(3, 2).rows_after(np.int64(6)) == 3
    with jax.numpy_dtype_promotion("strict"):
        assert int(KvWindow(3, 2).rows_after(jnp.int32(6))) == 3


@pytest.mark.parametrize("positions", [-1, True, jnp.zeros(3), np.float32(2.0), jnp.ones(2, bool)], ids=repr)
def test_rows_after_refuses_what_is_no_count(positions):
    with pytest.raises(ValueError, match=r"KvWindow\.rows_after\(positions=\.\.\.\) must be an int"):
        KvWindow(3, 2).rows_after(positions)


# Rules 32 and 33: the window itself


def test_rule_33_max_rows_is_window_plus_slack():
    assert KvWindow(8, 3).max_rows == 11


def test_rule_33_slack_zero_is_legal_and_keeps_exactly_the_window():
    assert [KvWindow(4, 0).rows_after(positions) for positions in (3, 4, 5, 6, 100)] == [3, 4, 4, 4, 4]


@pytest.mark.parametrize(("window", "slack"), [(1, 1), (2, 1), (3, 1), (4, 2), (512, 256), (4096, 2048)])
def test_rule_33_default_slack_is_half_the_window_and_at_least_one(window, slack):
    assert KvWindow.with_default_slack(window) == KvWindow(window, slack)


@pytest.mark.parametrize("window", [None, 0])
def test_rule_33_a_window_of_none_or_zero_builds_nothing(window):
    assert KvWindow.with_default_slack(window) is None


@pytest.mark.parametrize(("window", "slack"), [(0, 1), (-1, 1), (4, -1), (4.0, 1), (True, 1), (4, None)])
def test_a_window_that_is_no_window_is_refused(window, slack):
    with pytest.raises(ValueError, match=r"KvWindow\((window|slack)=\.\.\.\) must be an int of at least"):
        KvWindow(window, slack)


def test_windows_and_policies_are_frozen_hashable_values():
    assert len({KvWindow(4, 2), KvWindow(np.int32(4), 2), KvWindow(4, 1)}) == 2
    assert len({KvWindowPolicy.on(), KvWindowPolicy.on(), KvWindowPolicy.off()}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        KvWindow(4, 2).slack = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        KvWindowPolicy.on().enabled = False


def test_rule_32_a_layer_without_a_window_has_none_on_or_off():
    for policy in (KvWindowPolicy.on(), KvWindowPolicy.off()):
        assert policy.window_for(None) is None
        assert policy.window_for(0) is None


@pytest.mark.parametrize("attention_window", [1, 2, 7, 512, 4096])
def test_rule_32_the_eviction_window_is_the_attention_window(attention_window):
    kv_window = KvWindowPolicy.on().window_for(attention_window)
    assert kv_window.window == attention_window
    assert kv_window.max_rows >= attention_window


def test_rule_32_off_evicts_nothing():
    assert KvWindowPolicy.off().window_for(512) is None


@pytest.mark.parametrize("policy", [KvWindowPolicy.on(), KvWindowPolicy.off()], ids=["on", "off"])
def test_a_negative_attention_window_is_refused_on_and_off(policy):
    with pytest.raises(ValueError, match="must be an int of at least 0; got -4"):
        policy.window_for(-4)


# Rule 31: what turns it on


@pytest.mark.parametrize("value", ["1", "on", "true", "yes"])
def test_rule_31_exactly_four_values_turn_eviction_on(monkeypatch, value):
    monkeypatch.setenv("JAXINFER_KV_WINDOW", value)
    assert KvWindowPolicy.from_env() == KvWindowPolicy.on()


@pytest.mark.parametrize(
    "value", ["", "0", "off", "On", "TRUE", "Yes", " 1", "1 ", "on\n", "2", "y", "enabled"]
)
def test_rule_31_any_other_value_leaves_it_off(monkeypatch, value):
    monkeypatch.setenv(KV_WINDOW_ENV, value)
    assert KvWindowPolicy.from_env() == KvWindowPolicy.off()


def test_rule_31_it_is_off_by_default(monkeypatch):
    monkeypatch.delenv(KV_WINDOW_ENV, raising=False)
    assert KvWindowPolicy.from_env().enabled is False


def test_rule_31_a_policy_keeps_its_value_when_the_environment_changes(monkeypatch):
    monkeypatch.setenv(KV_WINDOW_ENV, "1")
    first = KvWindowPolicy.from_env()
    monkeypatch.setenv(KV_WINDOW_ENV, "0")
    assert first.window_for(8) == KvWindow(8, 4)
    assert KvWindowPolicy.from_env().window_for(8) is None


def test_a_policy_made_from_a_word_is_refused():
    with pytest.raises(ValueError, match=r"KvWindowPolicy\(enabled=\.\.\.\) must be a bool; got 'off'"):
        KvWindowPolicy("off")


# Rule 36: one expression decides


def test_rule_36_a_layers_window_comes_from_its_own_attention_window_and_full_layers_have_none():
    config = config_with_windows(4, 6, None)
    on = KvWindowPolicy.on()
    assert [on.layer_window(config, i) for i in range(3)] == [KvWindow(4, 2), KvWindow(6, 3), None]
    assert [KvWindowPolicy.off().layer_window(config, i) for i in range(3)] == [None] * 3


@pytest.mark.parametrize("layer_index", [-1, 3])
def test_a_layer_that_the_model_lacks_is_refused(layer_index):
    with pytest.raises(ValueError, match=r"layer_window\(layer_index=\.\.\.\) must be in 0\.\.2; got"):
        KvWindowPolicy.on().layer_window(config_with_windows(4, 4, None), layer_index)
