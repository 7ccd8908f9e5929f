"""Rows with images in prefill: every legal way to cut them, alone and beside text, is one forward."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxinfer as ji
from jaxinfer.generation import prefill, traces
from jaxinfer.generation.buckets import MAX_CHUNK, plan_prefill_buckets, plan_prefill_steps
from jaxinfer.generation.image_rows import image_row
from jaxinfer.images import ImagePrompt, image_prompt
from jaxinfer.models import ImageFeatures
from jaxinfer.spans.chunks import ImageRunTooLongError
from jaxinfer.testing import random_params, tiny_config
from tests.models.tiny_models import read_config, tiny_params
from tests.models.vision.columns import forward_alone, ids_of, image, spans_of, step_inputs
from tests.models.vision.test_towers import encode
from tests.oracles.tiny_checkpoints import load_oracle

WIDTH = 48
CONFIGS = {
    "gemma3": tiny_config("gemma3_image", layers=tiny_config("gemma3_image").layers[-2:]),
    "qwen3_vl": tiny_config("qwen3_vl"),
}
PARAMS = {name: random_params(config, 3) for name, config in CONFIGS.items()}
# (rows, columns) in tokens; D is another image of A's size.
GRIDS = {"A": (2, 2), "D": (2, 2), "one": (1, 1), "long": (4, 5)}
WORDS = list(range(1, 60))
ROWS = {
    "image first": [*image("A", 4), *WORDS[:5]],
    "image last": [*WORDS[:5], *image("A", 4)],
    "side by side": [7, *image("A", 4), *image("D", 4), 9],
    "one token": [7, 8, *image("one", 1), 9],
    "a run after a step": [*WORDS[:16], *image("A", 4), *WORDS[:3]],
    "a run to a step's end": [*WORDS[:12], *image("D", 4), 9],
    "across a step's end": [*WORDS[:14], *image("A", 4), *WORDS[:20]],
    "longer than a step": [*WORDS[:3], *image("long", 20), *WORDS[:2]],
    "the same twice": [*image("A", 4), 7, *image("A", 4), 8],
    "text": WORDS[:21],
}


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def features_of(config):
    layers = len(config.vision.deepstack_layers)
    random = np.random.default_rng(5)
    found = {}
    for name, (rows, columns) in GRIDS.items():
        embeddings = random.standard_normal((rows * columns, config.embed_dim)).astype(np.float32)
        stack = random.standard_normal((layers, *embeddings.shape)).astype(np.float32) if layers else None
        found[name] = ImageFeatures(embeddings, stack)
    return found


FEATURES = {name: features_of(config) for name, config in CONFIGS.items()}


@dataclasses.dataclass(frozen=True)
class Facts:
    grid: tuple
    num_tokens: int
    digest: str


def prompt_of(columns, config):
    facts = []
    for start, end, name in spans_of(columns):
        rows, width = GRIDS[name]
        facts.append(Facts((1, 2 * rows, 2 * width), end - start, name))
    content = tuple(spans_of(columns))
    return image_prompt(ids_of(columns, config), facts, config=config, content=content)


def cold(name, rows):
    """Logits [B, V] after each row, from one forward without a cache."""
    config = CONFIGS[name]
    tokens, inputs = step_inputs(rows, config, FEATURES[name], GRIDS, WIDTH)
    return np.asarray(forward_alone(PARAMS[name], tokens, inputs, config=config, mode="last"))


@pytest.mark.parametrize("max_chunk", [16, 64])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_step_size_gives_what_one_forward_gives_and_decoding_goes_on_from_it(name, max_chunk):
    config, rows = CONFIGS[name], list(ROWS.values())
    prompts = [prompt_of(row, config) for row in rows]
    state = ji.init_state(config, batch=len(rows), capacity=64)
    logits, state = prefill(
        PARAMS[name],
        [prompt.token_ids for prompt in prompts],
        state,
        config=config,
        donate=True,
        max_chunk=max_chunk,
        images=[image_row(prompt, FEATURES[name]) for prompt in prompts],
    )
    assert (np.asarray(state.status) == 0).all()
    for row, got, want in zip(ROWS, np.asarray(logits), cold(name, rows), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4, err_msg=row)
    one_more = np.full((len(rows), 1), 33, np.int32)
    logits, _ = ji.forward(PARAMS[name], one_more, state, config=config)
    want = cold(name, [[*row, 33] for row in rows])
    np.testing.assert_allclose(np.asarray(logits), want, rtol=0, atol=1e-4)


def in_two_parts(name, columns, cut):
    config, prompt = CONFIGS[name], prompt_of(columns, CONFIGS[name])
    head = ImagePrompt(
        prompt.token_ids[:cut],
        tuple((start, min(end, cut), digest) for start, end, digest in prompt.content if start < cut),
        None if prompt.positions is None else prompt.positions[:, :cut],
    )
    state = ji.init_state(config, capacity=64)
    logits = None
    for part, start in ((head, 0), (prompt, cut)):
        logits, state = prefill(
            PARAMS[name],
            [part.token_ids[start:]],
            state,
            config=config,
            donate=False,
            images=[image_row(part, FEATURES[name], start=start)],
        )
    return np.asarray(logits[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_prompt_that_goes_on_from_a_state_is_the_whole_prompt_wherever_it_may_be_cut(name):
    columns = [7, 8, *image("A", 4), 9, *image("one", 1), *image("D", 4), 10, 11]
    (want,) = cold(name, [columns])
    legal = 0
    for cut in range(1, len(columns)):
        inside = not isinstance(columns[cut - 1], int) and not isinstance(columns[cut], int)
        if name == "gemma3" and inside:
            with pytest.raises(ValueError, match="row 0 begins inside an image run"):
                in_two_parts(name, columns, cut)
        else:
            legal += 1
            np.testing.assert_allclose(in_two_parts(name, columns, cut), want, rtol=0, atol=1e-4)
    assert legal == (6 if name == "gemma3" else 13)


def test_text_beside_and_after_images_compiles_nothing_new():
    name = "qwen3_vl"
    config, rows = CONFIGS[name], [WORDS[:12], WORDS[:9]]

    def run(rows, images=()):
        state = ji.init_state(config, batch=2, capacity=64)
        return prefill(PARAMS[name], rows, state, config=config, donate=True, images=images)

    run(rows)
    before = traces()["prefill"]
    run(rows, [None, None])
    prompts = [prompt_of([*image("A", 4), *WORDS[:40]], config), ImagePrompt(tuple(WORDS[:40]))]
    shown = [image_row(prompt, FEATURES[name]) for prompt in prompts]
    run([prompt.token_ids for prompt in prompts], shown)
    new = traces()["prefill"] - before
    assert new == 1  # one step of 64 columns, with images
    run([prompt.token_ids for prompt in prompts], shown)
    run(rows)
    assert traces()["prefill"] == before + new


runs = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), max_size=5)


@given(st.lists(runs, min_size=1, max_size=4), st.sampled_from([16, 32, 64]))
def test_steps_cut_no_run_that_must_stay_whole_and_take_every_column_once(row_runs, max_chunk):
    lengths, whole = [], []
    for row in row_runs:
        spans, at = [], 0
        for gap, count in row:
            spans.append((at + gap + 1, at + gap + 1 + count))
            at = spans[-1][1]
        lengths.append(at + 3)
        whole.append(spans)
    at = np.zeros(len(lengths), np.int32)
    for step in plan_prefill_steps(lengths, max_chunk, whole_runs=whole):
        np.testing.assert_array_equal(step.starts, at)
        assert (step.counts <= step.size).all()
        assert step.counts.any()
        assert step.size & (step.size - 1) == 0
        at = at + step.counts
        for row, spans in enumerate(whole):
            assert not any(start < at[row] < end for start, end in spans)
    np.testing.assert_array_equal(at, lengths)


@pytest.mark.parametrize("lengths", [[1], [70, 3, 0], [700, 900], [0]])
def test_steps_of_text_are_those_of_the_longest_row(lengths):
    steps = plan_prefill_steps(lengths, 128)
    assert tuple(step.size for step in steps) == plan_prefill_buckets(max(lengths), 128)


def test_a_run_longer_than_any_step_is_refused_with_both_lengths():
    with pytest.raises(ImageRunTooLongError, match=f"run of 600 columns .* at most {MAX_CHUNK};"):
        plan_prefill_steps([700], 64, whole_runs=[[(50, 650)]])
    steps = plan_prefill_steps([300], 64, whole_runs=[[(20, 276)]])  # Gemma's 256 tokens
    assert [(step.size, int(step.counts[0])) for step in steps] == [(64, 20), (256, 256), (32, 24)]


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", "qwen3_5"])
def test_greedy_continuations_are_those_of_transformers(name):
    oracle, config, params = load_oracle(name), read_config(name), tiny_params(name)
    ids = oracle.inputs["input_ids"][0].tolist()
    grids = oracle.inputs.get("image_grid_thw")
    count = config.vision.tokens_per_image
    facts = (
        [Facts((1, 1, 1), count, str(index)) for index in range(ids.count(config.image_token_id) // count)]
        if grids is None
        else [
            Facts(tuple(map(int, grid)), int(np.prod(grid)) // config.vision.merge_size**2, str(index))
            for index, grid in enumerate(grids)
        ]
    )
    prompt = image_prompt(ids, facts, config=config)
    embeddings, deepstack = encode(name, oracle)
    features, at = {}, 0
    for fact in facts:
        taken = slice(at, at + fact.num_tokens)
        stack = None if deepstack is None else np.asarray(deepstack)[:, taken]
        features[fact.digest] = ImageFeatures(np.asarray(embeddings)[taken], stack)
        at += fact.num_tokens
    state = ji.init_state(config, capacity=len(ids) + 24)
    logits, state = prefill(
        params,
        [ids],
        state,
        config=config,
        donate=True,
        max_chunk=16,
        images=[image_row(prompt, features)],
    )
    found = []
    for _ in oracle.greedy_ids:
        found.append(int(logits[0].argmax()))
        logits, state = ji.forward(params, np.array([found[-1:]], np.int32), state, config=config)
    assert found == oracle.greedy_ids.tolist()
