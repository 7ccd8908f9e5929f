"""Gated DeltaNet hybrids: transformers' logits whatever the steps, and no trace of padding in the state."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer as ji
from jaxinfer.models import WeightsError, family_of
from jaxinfer.testing import random_params, tiny_config
from tests.models.tiny_models import DictTensors, assemble, read_config, tiny_params
from tests.oracles.tiny_checkpoints import load_oracle, tiny_weights

ORACLES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LENGTH = 100
ORACLE_TOLERANCE = 1e-3  # transformers' own two forms of the rule differ by 3.6e-4
ROUNDING = 2e-4
WIDTH = 37  # of a padded step
STEPS = {
    "chunks of 37": [37, 37, 26],
    "around a chunk of the rule": [31, 1, 32, 33, 3],
    "token by token": [1] * LENGTH,
}


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


jitted = jax.jit(ji.forward, static_argnames=("config", "logits", "implementation"))
jitted_with_aux = jax.jit(ji.forward_with_aux, static_argnames=("config", "logits", "implementation"))


def prompt(name):
    return load_oracle(name).inputs["input_ids"].astype(np.int32)


def assert_is_oracle(logits, name):
    expected = load_oracle(name).logits
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, rtol=0, atol=ORACLE_TOLERANCE)
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", ORACLES)
def test_logits_without_a_cache_are_those_of_transformers(name):
    logits, state = jitted(tiny_params(name), prompt(name), config=read_config(name), logits="all")
    assert state is None
    assert_is_oracle(np.asarray(logits[0]), name)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", ORACLES)
def test_logits_and_greedy_tokens_in_steps_are_those_of_transformers(name, steps):
    config, tokens, parts = read_config(name), prompt(name)[0], []
    state = ji.init_state(config, capacity=LENGTH + 16)
    width = min(WIDTH, max(STEPS[steps]))
    for size in STEPS[steps]:
        start = int(state.length[0])
        padded = np.full((1, width), 7, np.int32)
        padded[0, :size] = tokens[start : start + size]
        inputs = ji.StepInputs(lengths=np.array([size], np.int32))
        logits, state = jitted(tiny_params(name), padded, state, config=config, inputs=inputs, logits="all")
        parts.append(np.asarray(logits[0, :size]))
    assert_is_oracle(np.concatenate(parts), name)
    assert state.length.tolist() == [LENGTH]
    assert state.status.tolist() == [0]
    if width > 1:
        return
    found = [int(parts[-1][0].argmax())]
    while len(found) < 16:
        token, one = np.array([found[-1:]], np.int32), ji.StepInputs(lengths=np.array([1], np.int32))
        logits, state = jitted(tiny_params(name), token, state, config=config, inputs=one, logits="all")
        found.append(int(logits[0, 0].argmax()))
    assert found == load_oracle(name).greedy_ids.tolist()


# Checkpoints


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_an_image_checkpoint_gives_its_text_model(name):
    params = assemble(name, DictTensors(tiny_weights(name)))
    config = read_config(name)
    assert config.image_token_id == load_oracle(name).config["image_token_id"]
    # Up to the first image the prompt is text.
    oracle = load_oracle(name)
    ids = oracle.inputs["input_ids"].astype(np.int32)
    first_image = int(np.argmax(ids[0] == config.image_token_id))
    logits, _ = ji.forward(params, ids[:, :first_image], config=config, logits="all")
    np.testing.assert_allclose(logits[0], oracle.logits[:first_image], rtol=0, atol=ORACLE_TOLERANCE)


def test_heads_for_multi_token_prediction_are_ignored_and_other_extras_are_named():
    weights = tiny_weights("qwen3_next")
    extra = weights | {"mtp.layers.0.mlp.gate.weight": np.ones((2, 2), np.float32)}
    jax.tree.map(
        np.testing.assert_array_equal, assemble("qwen3_next", DictTensors(extra)), tiny_params("qwen3_next")
    )
    for name in ("linear_attn.in_proj_qkvz.weight", "linear_attn.A_log"):
        wrong = dict(weights)
        wrong[f"model.layers.1.{name}s"] = wrong.pop(f"model.layers.1.{name}")
        with pytest.raises(WeightsError, match=rf"missing: model\.layers\.1\.{name}; extra: .*{name}s$"):
            assemble("qwen3_next", DictTensors(wrong))


def test_both_layouts_of_the_projections_give_the_same_params():
    """Qwen3-Next's rows by key head, written out as Qwen3.5's rows by kind."""
    weights, sizes = tiny_weights("qwen3_next"), read_config("qwen3_next").gated_delta
    heads, key_dim, per_key = sizes.num_key_heads, sizes.key_head_dim, sizes.num_groups
    values = per_key * sizes.value_head_dim
    for layer in range(3):
        at = f"model.layers.{layer}.linear_attn.in_proj_"
        qkvz = weights.pop(f"{at}qkvz.weight").reshape(heads, -1, 64)
        ba = weights.pop(f"{at}ba.weight").reshape(heads, 2 * per_key, 64)
        q, k, v, z = np.split(qkvz, np.cumsum([key_dim, key_dim, values]), axis=1)
        weights[f"{at}qkv.weight"] = np.concatenate([part.reshape(-1, 64) for part in (q, k, v)])
        weights[f"{at}z.weight"] = z.reshape(-1, 64)
        weights[f"{at}b.weight"] = ba[:, :per_key].reshape(-1, 64)
        weights[f"{at}a.weight"] = ba[:, per_key:].reshape(-1, 64)
    jax.tree.map(
        np.testing.assert_array_equal,
        assemble("qwen3_next", DictTensors(weights)),
        tiny_params("qwen3_next"),
    )


def test_the_norm_of_a_gated_delta_layer_stores_its_full_multiplier_and_the_others_do_not():
    params, weights = tiny_params("qwen3_5_text"), tiny_weights("qwen3_5_text")
    at = "model.layers.0."
    np.testing.assert_array_equal(params.layers[0].mixer.norm, weights[f"{at}linear_attn.norm.weight"])
    np.testing.assert_allclose(
        params.layers[0].mixer_norm, 1 + weights[f"{at}input_layernorm.weight"], rtol=1e-6
    )


@pytest.mark.parametrize("name", ORACLES)
def test_the_legacy_layout_of_a_config_reads_as_the_nested_one(name):
    raw = dict(load_oracle(name).config)
    rope = raw.pop("rope_parameters")
    legacy = {
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "full_attention_interval": 4,
    }
    if "mrope_section" in rope:
        legacy["rope_scaling"] = {"rope_type": "default", "mrope_section": rope["mrope_section"]}
    raw.pop("layer_types")
    assert family_of(raw).read_config(raw | legacy) == read_config(name)


def test_a_quarter_of_each_head_is_rotated_where_the_config_does_not_say():
    raw = dict(load_oracle("qwen3_next").config)
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e7}
    assert family_of(raw).read_config(raw).layers[3].rope.rotary_dim == 8  # of 32


def test_a_sliding_layer_in_a_hybrid_is_refused():
    raw = load_oracle("qwen3_next").config | {"layer_types": ["sliding_attention"] * 4}
    with pytest.raises(ValueError, match=r"layer_types \['sliding_attention'\]; known are"):
        family_of(raw).read_config(raw)


# State

TOKENS = np.random.RandomState(0).randint(0, 250, (2, 40)).astype(np.int32)


@functools.cache
def toy(dtype="float32"):
    """A recurrent layer and a full one: what these tests need, quickly compiled."""
    config = tiny_config("qwen3_5", dtype=dtype)
    config = dataclasses.replace(config, layers=config.layers[2:])
    return config, random_params(config, seed=3)


def run(tokens, state, *, dtype="float32", **inputs):
    config, params = toy(dtype)
    inputs = ji.StepInputs(**{name: np.asarray(value, np.int32) for name, value in inputs.items()})
    logits, state = jitted(params, tokens, state, config=config, inputs=inputs, logits="all")
    return np.asarray(logits), state


def empty(batch=2, dtype="float32"):
    return ji.init_state(toy(dtype)[0], batch=batch, capacity=48)


def assert_same_state(got, expected, atol=ROUNDING):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=0, atol=atol
        )


def test_fault_20_prefill_and_decode_equal_one_pass_at_every_split():
    expected, _ = run(TOKENS, None)
    # One padded shape for the first part and one for the second, so that every split shares two programs.
    for split in range(1, 40):
        lengths = np.full(2, split)
        first, state = run(TOKENS, empty(), lengths=lengths)
        rest = np.zeros_like(TOKENS)
        rest[:, : 40 - split] = TOKENS[:, split:]
        second, _ = run(rest, state, lengths=40 - lengths)
        got = np.concatenate([first[:, :split], second[:, : 40 - split]], axis=1)
        np.testing.assert_allclose(got, expected, rtol=0, atol=ROUNDING)
        assert (got.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("batch", [1, 2])
def test_fault_17_right_padding_changes_neither_logits_nor_state(batch):
    tokens = TOKENS[:batch, :9]
    logits, state = run(tokens, empty(batch))
    padded = np.concatenate([tokens, np.full((batch, 3), 7, np.int32)], axis=1)
    padded_logits, padded_state = run(padded, empty(batch), lengths=[9] * batch)
    np.testing.assert_allclose(padded_logits[:, :9], logits, rtol=0, atol=ROUNDING)
    assert_same_state(padded_state, state)


def test_rows_of_different_lengths_are_each_as_if_alone():
    lengths, alone_states = [5, 17], []
    logits, state = run(TOKENS, empty(), lengths=lengths)
    more, after = run(TOKENS[:, 20:26], state, lengths=[6, 0])
    for row in range(2):
        alone, alone_state = run(TOKENS[row : row + 1, : lengths[row]], empty(1))
        alone_states.append(alone_state)
        np.testing.assert_allclose(logits[row, : lengths[row]], alone[0], rtol=0, atol=ROUNDING)
        for layer, alone_layer in zip(state.layers[:1], alone_state.layers, strict=False):
            assert_same_state(jax.tree.map(lambda leaf: leaf[row : row + 1], layer), alone_layer)  # noqa: B023
    for layer, before in zip(after.layers[:1], state.layers, strict=False):
        assert_same_state(jax.tree.map(lambda leaf: leaf[1], layer), jax.tree.map(lambda x: x[1], before), 0)
    follows, _ = run(TOKENS[:1, 20:26], alone_states[0])
    np.testing.assert_allclose(more[0], follows[0], rtol=0, atol=ROUNDING)


def test_fault_19_a_bfloat16_model_has_a_float32_recurrent_state_and_finite_logits():
    state = empty(dtype="bfloat16")
    for steps in (TOKENS[:, :20], TOKENS[:, 20:21]):
        logits, state = run(steps, state, dtype="bfloat16")
        assert np.isfinite(logits).all()
    for layer in state.layers[:1]:
        assert layer.recurrent_state.dtype == jnp.float32
        assert layer.conv_state.dtype == jnp.bfloat16
    loud = [layer.replace(recurrent_state=layer.recurrent_state + 1e5) for layer in state.layers[:1]]
    loud = state.replace(layers=(*loud, state.layers[1]))
    logits, _ = run(TOKENS[:, 21:22], loud, dtype="bfloat16")
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("field", ["recurrent_state", "conv_state"])
def test_fault_15_spoiling_only_the_state_of_a_gated_delta_layer_changes_the_output(field):
    _, state = run(TOKENS[:, :20], empty())
    wanted, _ = run(TOKENS[:, 20:21], state)
    layer, attention = state.layers
    spoiled = layer.replace(**{field: jnp.zeros_like(getattr(layer, field))})
    got, _ = run(TOKENS[:, 20:21], state.replace(layers=(spoiled, attention)))
    assert np.abs(got - wanted).max() > 1e-2


def test_columns_past_the_capacity_change_no_recurrent_state():
    _, full = run(TOKENS, empty())
    _, exact = run(TOKENS[:, :8], full)
    _, over = run(TOKENS[:, :12], full)  # of 48 positions, 40 are taken
    assert over.status.tolist() == [int(ji.Status.OVERFLOWED)] * 2
    assert_same_state(over.layers, exact.layers)


def test_gradients_flow_through_every_weight():
    config, params = toy()

    def loss(params):
        logits, _ = ji.forward(params, TOKENS[:, :12], config=config, logits="all")
        return -jnp.mean(jax.nn.log_softmax(logits)[:, :-1, 3])

    for path, gradient in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params)):
        assert np.isfinite(gradient).all(), path
        assert np.abs(gradient).max() > 0, path


def test_a_model_of_gated_delta_layers_alone_has_no_capacity_to_exceed():
    config, params = toy()
    layers = config.layers[:1]
    config = dataclasses.replace(config, layers=layers)
    params = params.replace(layers=params.layers[:1])
    state = ji.init_state(config, capacity=2)
    assert state.capacity is None
    logits, state = ji.forward(params, TOKENS[:1], state, config=config)
    assert state.length.tolist() == [40]
    assert np.isfinite(logits).all()
