"""Prompts with images give the logits of transformers, and each layer attends where a dense mask says."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer as ji
from jaxinfer.ops import span_attention
from tests.models.tiny_models import read_config, tiny_params
from tests.models.vision.oracles import gemma_mask, image_flags, mrope_positions
from tests.models.vision.test_towers import encode
from tests.oracles.tiny_checkpoints import IMAGE_ORACLES, load_oracle

TOLERANCES = {"gemma3": 2e-5, "qwen3_vl": 2e-5, "qwen3_5": 1e-3, "qwen3_5_moe": 1e-3}


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@functools.cache
def prompt(name, edges=False):
    """(ids int32 [1, T], StepInputs) of an oracle's prompt, features from the tower."""
    oracle, config = load_oracle(name, edges=edges), read_config(name)
    ids = oracle.inputs["input_ids"].astype(np.int32)
    flags = image_flags(ids[0], config.image_token_id)
    embeddings, deepstack = encode(name, oracle)
    full = np.zeros((1, ids.shape[1], config.embed_dim), np.float32)
    full[0, flags] = embeddings
    positions = None
    if "image_grid_thw" in oracle.inputs:
        merged = [tuple(grid[1:] // 2) for grid in oracle.inputs["image_grid_thw"]]
        positions = mrope_positions(flags, merged).astype(np.int32)[:, None]
    stack = None
    if deepstack is not None:
        stack = np.zeros((len(deepstack), *full.shape), np.float32)
        stack[:, 0, flags] = deepstack
    return ids, ji.StepInputs(
        is_image=flags[None],
        embeddings=full,
        embedding_mask=flags[None],
        positions=positions,
        deepstack=stack,
    )


def columns(inputs, start, end):
    """The inputs of columns start to end."""
    of_columns = {"positions": (..., slice(start, end)), "deepstack": np.s_[:, :, start:end]}
    cut = {
        name: value[of_columns.get(name, np.s_[:, start:end])]
        for name in ("is_image", "embeddings", "embedding_mask", "positions", "deepstack")
        if (value := getattr(inputs, name)) is not None
    }
    return ji.StepInputs(**cut)


@functools.partial(jax.jit, static_argnames="config")
def step(params, ids, state, inputs, *, config):
    return ji.forward(params, ids, state, config=config, inputs=inputs, logits="all")


def assert_is_oracle(logits, name, edges=False):
    expected = load_oracle(name, edges=edges).logits
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCES[name])
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", "qwen3_5"])
def test_logits_with_images_at_the_ends_are_those_of_transformers(name):
    ids, inputs = prompt(name, edges=True)
    logits, _ = ji.forward(tiny_params(name), ids, config=read_config(name), inputs=inputs, logits="all")
    assert_is_oracle(np.asarray(logits[0]), name, edges=True)


@pytest.mark.parametrize(
    ("name", "kv_window"),
    [(name, ji.KvWindowPolicy.off()) for name in IMAGE_ORACLES] + [("gemma3", ji.KvWindowPolicy.on())],
    ids=[*IMAGE_ORACLES, "gemma3-evicting"],
)
def test_logits_and_greedy_continuation_are_those_of_transformers(name, kv_window):
    (ids, inputs), config, params = prompt(name), read_config(name), tiny_params(name)
    state = ji.init_state(config, capacity=80, max_append=ids.shape[1], kv_window=kv_window)
    logits, state = step(params, ids, state, inputs, config=config)
    assert_is_oracle(np.asarray(logits[0]), name)
    found = []
    for _ in load_oracle(name).greedy_ids:
        found.append(int(logits[0, -1].argmax()))
        one = np.array([found[-1:]], np.int32)
        logits, state = step(params, one, state, ji.StepInputs(), config=config)
    assert found == load_oracle(name).greedy_ids.tolist()


def padded(inputs, width):
    """Inputs of fewer columns, padded on the right to `width` columns."""
    size = inputs.is_image.shape[1]
    axes = {"positions": -1, "deepstack": 2}
    wide = {"lengths": np.array([size], np.int32)}
    for name in ("is_image", "embeddings", "embedding_mask", "positions", "deepstack"):
        if (value := getattr(inputs, name)) is not None:
            pad = [(0, 0)] * value.ndim
            pad[axes.get(name, 1)] = (0, width - size)
            wide[name] = np.pad(value, pad)
    return ji.StepInputs(**wide)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_chunks_of_a_prompt_give_its_logits(name):
    (ids, inputs), config, width = prompt(name, edges=True), read_config(name), 32
    flags = np.asarray(inputs.is_image[0])
    chunks = ji.plan_prefill_chunks(flags, width) if config.is_bidirectional else [(0, 5), (5, 18), (18, 42)]
    assert len(chunks) > 2
    state, parts = ji.init_state(config, capacity=96, max_append=width), []
    for start, end in chunks:
        chunk = np.pad(ids[:, start:end], [(0, 0), (0, width - end + start)])
        cut = padded(columns(inputs, start, end), width)
        logits, state = step(tiny_params(name), chunk, state, cut, config=config)
        parts.append(np.asarray(logits[0, : end - start]))
    assert_is_oracle(np.concatenate(parts), name, edges=True)


def test_a_chunk_that_continues_a_run_is_refused():
    (ids, inputs), config = prompt("gemma3"), read_config("gemma3")
    state = ji.init_state(config, capacity=64)
    half = columns(inputs, 0, 12)  # the first run is columns 6 to 21
    _, state = ji.forward(tiny_params("gemma3"), ids[:, :12], state, config=config, inputs=half)
    with pytest.raises(ValueError, match="continues an image run that an earlier step began"):
        ji.forward(tiny_params("gemma3"), ids[:, 12:], state, config=config, inputs=columns(inputs, 12, 52))


def spans_of_layers(name, edges, monkeypatch):
    """The spans that each layer of a real forward hands to the attention op, as masks [T, S]."""
    masks = []

    def record(lo, hi):
        masks.append(np.asarray(ji.KeySpans(lo, hi).as_mask(lo.shape[1])[0]))

    def recording(query, key, value, lo, hi, **options):
        jax.debug.callback(record, lo, hi, ordered=True)
        return span_attention(query, key, value, lo, hi, **options)

    monkeypatch.setattr(sys.modules["jaxinfer.nn.attention"], "span_attention", recording)
    # A config of its own: no other test has traced, or will use, these programs.
    config = dataclasses.replace(read_config(name), max_positions=333)
    ids, inputs = prompt(name, edges)
    ji.forward(tiny_params(name), ids, config=config, inputs=inputs, logits="none")
    jax.effects_barrier()
    return masks


@pytest.mark.parametrize("edges", [False, True], ids=["prompt", "edges"])
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_each_layer_attends_where_a_dense_mask_says(name, edges, monkeypatch):
    config, flags = read_config(name), np.asarray(prompt(name, edges)[1].is_image[0])
    if name == "qwen3_vl":
        flags = np.zeros_like(flags)  # causal, over images too
    masks = spans_of_layers(name, edges, monkeypatch)
    assert len(masks) == len(config.layers)
    for mask, layer in zip(masks, config.layers, strict=True):
        np.testing.assert_array_equal(mask, gemma_mask(flags, layer.window))


def test_the_last_token_of_an_image_reaches_its_first_and_no_text_before_it():
    (ids, inputs), config = prompt("gemma3"), read_config("gemma3")
    first, last = 6, 21
    config = dataclasses.replace(config, layers=config.layers[:1])
    params = tiny_params("gemma3")
    params = params.replace(layers=params.layers[:1])

    def logits(embeddings):
        changed = inputs.replace(embeddings=embeddings)
        return ji.forward(params, ids, config=config, inputs=changed, logits="all")[0][0]

    moved = inputs.embeddings.copy()
    moved[0, last] += 1.0
    difference = np.abs(np.asarray(logits(moved) - logits(inputs.embeddings))).max(-1)
    # In the first layer an image column reads its run to the end, back to its window.
    assert (difference[first : last + 1] > 1e-4).all()
    assert (difference[:first] == 0).all()
    assert (difference[last + 8 :] == 0).all()  # behind the window of 8


def test_positions_of_two_images_and_the_delta_after_them():
    # [1, 2, VS, IMG x4, 5, VS, IMG x4, 7], grids 1x4x4, merged by 2.
    ids = np.array([[1, 2, 253, 255, 255, 255, 255, 5, 253, 255, 255, 255, 255, 7]], np.int32)
    positions = mrope_positions(ids[0] == 255, [(2, 2), (2, 2)])
    assert positions[:, 3:7].tolist() == [[3, 3, 3, 3], [3, 3, 4, 4], [3, 4, 3, 4]]
    assert positions[:, 7:9].tolist() == [[5, 6]] * 3
    assert positions[:, 9:13].tolist() == [[7, 7, 7, 7], [7, 7, 8, 8], [7, 8, 7, 8]]
    assert positions[:, 13].tolist() == [9] * 3
    config = read_config("qwen3_vl")
    inputs = ji.StepInputs(is_image=ids == 255, positions=jnp.asarray(positions[:, None], jnp.int32))
    state = ji.init_state(config, capacity=24)
    _, state = ji.forward(tiny_params("qwen3_vl"), ids, state, config=config, inputs=inputs)
    assert state.rope_delta.tolist() == [-4]
    assert int(state.length[0] + state.rope_delta[0]) == 10  # of the first decoded token
