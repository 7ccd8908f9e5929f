"""`forward`: what it refuses, what it marks, and what padding and chunking must not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer as ji
from jaxinfer.testing import random_params, tiny_config

CONFIG = tiny_config("llama")
PARAMS = random_params(CONFIG, seed=1)
TOKENS = np.random.RandomState(0).randint(0, CONFIG.vocab_size, (2, 12)).astype(np.int32)
jitted = jax.jit(ji.forward, static_argnames=("config", "logits", "implementation"))


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def state_of(batch=2, capacity=16, config=CONFIG):
    return ji.init_state(config, batch=batch, capacity=capacity)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.zeros((2, 16), np.float32), r"must be int32 \[B, T\]; got float32 \(2, 16\)"),
        (np.zeros(4, np.int32), r"must be int32 \[B, T\]; got int32 \(4,\).*tokens\[None\]"),
        (np.zeros((1, 0), np.int32), "at least one row and column"),
        (np.array([[1, CONFIG.vocab_size]], np.int32), rf"got {CONFIG.vocab_size} at row 0, column 1"),
        (np.array([[-1]], np.int32), "got -1 at row 0, column 0"),
    ],
)
def test_bad_tokens_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        ji.forward(PARAMS, tokens, config=CONFIG)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (dict(lengths=jnp.array([3])), r"lengths=\.\.\.\) must be int32 \[2\]"),
        (dict(lengths=np.array([3, 13], np.int32)), r"must be in 0\.\.12"),
        (dict(is_image=np.zeros((2, 12), np.int32)), "must be bool"),
        (dict(embeddings=jnp.zeros((2, 12, CONFIG.embed_dim))), "go together"),
        (dict(positions=jnp.zeros((2, 12), jnp.float32)), "positions"),
        (dict(adapter_ids=jnp.zeros(2, jnp.int32)), "not supported yet"),
        (dict(logit_columns=jnp.zeros((2, 1), jnp.int32)), "go together"),
        (dict(positions=jnp.zeros((3, 2, 12), jnp.int32)), r"positions=.*must be int32 \[2, 12\]; got"),
    ],
)
def test_bad_inputs_are_refused(inputs, message):
    with pytest.raises(ValueError, match=message):
        ji.forward(PARAMS, TOKENS, config=CONFIG, inputs=ji.StepInputs(**inputs))


@pytest.mark.parametrize("column", [-1, 5, 12])
def test_logit_columns_that_are_not_real_columns_are_refused(column):
    inputs = ji.StepInputs(lengths=np.int32([12, 5]), logit_columns=np.int32([[0], [column]]))
    with pytest.raises(ValueError, match=r"logit_columns=.*must be real columns of their row"):
        ji.forward(PARAMS, TOKENS, config=CONFIG, inputs=inputs, logits="columns")


def test_traced_columns_that_are_not_real_give_nan_and_leave_the_others():
    inputs = ji.StepInputs(lengths=np.int32([12, 5]), logit_columns=np.int32([[3, 11], [4, 5]]))
    run = jax.jit(
        lambda inputs: ji.forward(PARAMS, TOKENS, config=CONFIG, inputs=inputs, logits="columns")[0]
    )
    assert np.isnan(run(inputs)).all(axis=-1).tolist() == [[False, False], [False, True]]


def test_unknown_logits_mode_is_refused():
    with pytest.raises(ValueError, match="got 'first'"):
        ji.forward(PARAMS, TOKENS, config=CONFIG, logits="first")


def test_rows_of_tokens_and_state_must_agree():
    with pytest.raises(ValueError, match="has 2 rows, state has 1"):
        ji.forward(PARAMS, TOKENS, state_of(batch=1), config=CONFIG)


def test_overflow_is_refused_by_lengths_not_by_padded_columns():
    _, state = ji.forward(PARAMS, TOKENS, state_of(), config=CONFIG)
    fits = ji.StepInputs(lengths=np.array([4, 0], np.int32))
    _, after = ji.forward(PARAMS, TOKENS, state, config=CONFIG, inputs=fits)
    assert after.length.tolist() == [16, 12]
    too_long = ji.StepInputs(lengths=np.array([4, 5], np.int32))
    with pytest.raises(ValueError, match="row 1 holds 12 of 16 positions and gets 5 more"):
        ji.forward(PARAMS, TOKENS, state, config=CONFIG, inputs=too_long)


def test_overflow_under_jit_keeps_the_rows_below_capacity_and_marks_the_row_for_good():
    _, state = ji.forward(PARAMS, TOKENS, state_of(), config=CONFIG)
    lengths = jnp.array([4, 6], jnp.int32)
    logits, over = jitted(PARAMS, TOKENS, state, config=CONFIG, inputs=ji.StepInputs(lengths=lengths))
    assert over.length.tolist() == [16, 16]
    assert over.status.tolist() == [0, int(ji.Status.OVERFLOWED)]
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1]).all()
    _, exact = ji.forward(
        PARAMS, TOKENS, state, config=CONFIG, inputs=ji.StepInputs(lengths=np.array([4, 4], np.int32))
    )
    for kept, wanted in zip(over.layers, exact.layers, strict=True):
        np.testing.assert_allclose(kept.key, wanted.key, atol=1e-6)
    logits, later = jitted(PARAMS, TOKENS[:, :1], over, config=CONFIG)
    assert later.length.tolist() == [16, 16]
    assert np.isnan(logits).all()


def test_bad_token_under_jit_marks_its_row_only():
    tokens = jnp.asarray(TOKENS).at[1, 3].set(CONFIG.vocab_size)
    logits, state = jitted(PARAMS, tokens, state_of(), config=CONFIG)
    assert state.status.tolist() == [0, int(ji.Status.BAD_TOKEN)]
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1]).all()
    logits, _ = jitted(PARAMS, tokens, config=CONFIG)
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1]).all()
    logits, state = jitted(PARAMS, TOKENS[:, :1], state, config=CONFIG)
    assert np.isnan(logits[1]).all()


def test_bad_token_in_padding_is_not_read():
    tokens = TOKENS.copy()
    tokens[1, 3:] = -7
    inputs = ji.StepInputs(lengths=np.array([12, 3], np.int32))
    logits, state = ji.forward(PARAMS, tokens, state_of(), config=CONFIG, inputs=inputs)
    assert state.status.tolist() == [0, 0]
    assert np.isfinite(logits).all()


def test_continuing_an_image_run_is_refused_or_marked():
    config = tiny_config("gemma3_image")
    params = random_params(config, seed=2)
    flags = np.zeros((2, 4), bool)
    flags[0, 2:] = True
    tokens = TOKENS[:, :4]
    _, state = ji.forward(
        params, tokens, state_of(config=config), config=config, inputs=ji.StepInputs(is_image=flags)
    )
    assert state.ends_in_image.tolist() == [True, False]
    more = ji.StepInputs(is_image=np.ones((2, 4), bool))
    with pytest.raises(ValueError, match="row 0"):
        ji.forward(params, tokens, state, config=config, inputs=more)
    logits, state = jitted(params, tokens, state, config=config, inputs=more)
    assert state.status.tolist() == [int(ji.Status.CUT_RUN), 0]
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()


def test_an_image_may_be_cut_anywhere_where_every_layer_is_causal():
    state = state_of()
    assert state.ends_in_image is None
    inputs = ji.StepInputs(is_image=np.ones((2, 4), bool))
    _, state = ji.forward(PARAMS, TOKENS[:, :4], state, config=CONFIG, inputs=inputs)
    _, state = ji.forward(PARAMS, TOKENS[:, :4], state, config=CONFIG, inputs=inputs)
    assert state.status.tolist() == [0, 0]


def test_right_padding_changes_neither_logits_nor_state():
    lengths = np.array([5, 9], np.int32)
    plain = [
        ji.forward(PARAMS, TOKENS[row : row + 1, : lengths[row]], state_of(batch=1), config=CONFIG)
        for row in (0, 1)
    ]
    logits, state = ji.forward(
        PARAMS, TOKENS, state_of(), config=CONFIG, inputs=ji.StepInputs(lengths=lengths)
    )
    assert state.length.tolist() == [5, 9]
    for row, (alone, alone_state) in enumerate(plain):
        np.testing.assert_allclose(logits[row], alone[0], atol=2e-5)
        for layer, alone_layer in zip(state.layers, alone_state.layers, strict=True):
            np.testing.assert_allclose(layer.key[row], alone_layer.key[0], atol=1e-5)
            np.testing.assert_array_equal(layer.value[row, :, lengths[row] :], 0)


def test_an_empty_row_has_zero_logits_and_keeps_its_state():
    _, state = ji.forward(PARAMS, TOKENS, state_of(), config=CONFIG)
    logits, after = ji.forward(
        PARAMS, TOKENS[:, :2], state, config=CONFIG, inputs=ji.StepInputs(lengths=np.array([0, 2], np.int32))
    )
    np.testing.assert_array_equal(logits[0], 0)
    assert after.length.tolist() == [12, 14]
    np.testing.assert_array_equal(after.layers[0].key[0], state.layers[0].key[0])


def test_logits_modes_agree():
    every, _ = ji.forward(PARAMS, TOKENS, config=CONFIG, logits="all")
    last, _ = ji.forward(PARAMS, TOKENS, config=CONFIG)
    columns = np.array([[3, 0], [11, 5]], np.int32)
    some, _ = ji.forward(
        PARAMS, TOKENS, config=CONFIG, logits="columns", inputs=ji.StepInputs(logit_columns=columns)
    )
    none, state = ji.forward(PARAMS, TOKENS, config=CONFIG, logits="none")
    assert none is None
    assert state is None
    np.testing.assert_allclose(last, every[:, -1], atol=1e-5)
    np.testing.assert_allclose(some, np.take_along_axis(np.asarray(every), columns[:, :, None], 1), atol=1e-5)
    assert every.dtype == last.dtype == jnp.float32


def test_embeddings_replace_those_of_tokens_after_scaling():
    config = tiny_config("gemma3")
    params = random_params(config, seed=2)
    mask = np.zeros((2, 12), bool)
    mask[:, 4] = True
    scaled = params.embedding[TOKENS] * np.sqrt(config.embed_dim).astype(np.float32)
    tokens = np.where(mask, config.vocab_size + 5, TOKENS)  # ids under the mask are not looked up
    logits, _ = ji.forward(
        params, tokens, config=config, inputs=ji.StepInputs(embeddings=scaled, embedding_mask=mask)
    )
    expected, _ = ji.forward(params, TOKENS, config=config)
    np.testing.assert_allclose(logits, expected, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prefill_and_decode_equal_one_pass_at_every_split(family):
    config = tiny_config(family)
    params = random_params(config, seed=2)
    expected, _ = ji.forward(params, TOKENS, config=config, logits="all")
    # One padded shape for the first part and one for the second, so that every split shares two programs.
    for split in range(1, 12):
        state = ji.init_state(config, batch=2, capacity=16)
        lengths = np.full(2, split, np.int32)
        first, state = jitted(
            params, TOKENS, state, config=config, inputs=ji.StepInputs(lengths=lengths), logits="all"
        )
        rest = np.zeros_like(TOKENS)
        rest[:, : 12 - split] = TOKENS[:, split:]
        second, state = jitted(
            params, rest, state, config=config, inputs=ji.StepInputs(lengths=12 - lengths), logits="all"
        )
        got = np.concatenate([first[:, :split], second[:, : 12 - split]], axis=1)
        np.testing.assert_allclose(got, expected, atol=2e-5)
        assert (got.argmax(-1) == expected.argmax(-1)).all()


def test_garbage_in_unused_rows_leaves_the_output_unchanged():
    state = state_of()
    _, clean = ji.forward(PARAMS, TOKENS[:, :6], state, config=CONFIG)
    unused = jnp.arange(16)[None, None, :, None] >= 6
    spoil = lambda rows: jnp.where(unused, 1e30, rows)  # noqa: E731
    dirty = clean.replace(
        layers=tuple(layer.replace(key=spoil(layer.key), value=spoil(layer.value)) for layer in clean.layers)
    )
    wanted, _ = ji.forward(PARAMS, TOKENS[:, 6:8], clean, config=CONFIG)
    got, _ = ji.forward(PARAMS, TOKENS[:, 6:8], dirty, config=CONFIG)
    np.testing.assert_array_equal(got, wanted)
