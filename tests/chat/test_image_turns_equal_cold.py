"""The turns of `test_turns_equal_cold`, with images among the tokens: the same must hold of them."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jaxinfer as ji
from jaxinfer.chat.turn import run_turn
from jaxinfer.generation.image_features import ImageEncoder
from jaxinfer.generation.image_prompts import ShownPrompt
from jaxinfer.generation.rows import Options
from jaxinfer.images import image_prompt
from jaxinfer.testing import tiny_config, tiny_model
from tests.chat.test_turns_equal_cold import (
    CAPACITY,
    EACH_KIND,
    NUM_TOP,
    OFF,
    ON,
    Conversations,
    Turn,
    check_modes,
    run_sequences,
)
from tests.models.vision.columns import forward_alone, ids_of, image, spans_of, step_inputs

FIRST_IMAGE = 180  # tokens of a turn from here on stand for images


def tiny(family, **config):
    """A model of two layers whose images are of few tokens."""
    whole = tiny_config(family, **config)
    vision = dataclasses.replace(
        whole.vision, num_layers=1, deepstack_layers=whole.vision.deepstack_layers[:1]
    )
    if vision.kind == "siglip":
        vision = dataclasses.replace(vision, image_size=16, num_positions=16)
    return tiny_model(family, seed=5, layers=whole.layers[-2:], vision=vision, **config)


# A window that is shorter than a run.
MODELS = {"gemma3_image": tiny("gemma3_image", window=3), "qwen3_vl": tiny("qwen3_vl")}


@functools.cache
def images_of(family):
    """Four images: two of a size, one of one token where the size says how many, and a long one."""
    random, config = np.random.default_rng(3), MODELS[family].config.vision
    sizes = [(16, 16), (16, 16), (8, 8), (8, 40)]
    pixels = [random.integers(0, 256, (*size, 3)).astype(np.uint8) for size in sizes]
    return tuple(ji.prepare_image(array, config) for array in pixels)


@functools.cache
def by_digest(family):
    return {prepared.digest: prepared for prepared in images_of(family)}


@functools.cache
def features_of(family):
    model = MODELS[family]
    return {
        prepared.digest: jax.device_get(
            ji.encode_image(model.vision, prepared.pixels, config=model.config.vision, grid=prepared.grid)
        )
        for prepared in images_of(family)
    }


@functools.cache
def cold_logprobs(family, columns):
    """Log-probabilities [CAPACITY, V] after each column, from nothing and without a cache."""
    model = MODELS[family]
    grids = {
        digest: (prepared.grid[1] // 2, prepared.grid[2] // 2)
        for digest, prepared in by_digest(family).items()
    }
    tokens, inputs = step_inputs([columns], model.config, features_of(family), grids, CAPACITY)
    logits = forward_alone(model.params, tokens, inputs, config=model.config, mode="all")
    return np.asarray(jax.nn.log_softmax(logits[0]))


class ImageConversations(Conversations):
    """A column is a token or, of an image, (digest, its place in it)."""

    def __init__(self, family, *rest):
        super().__init__(family, *rest)
        self.encoder = ImageEncoder(self.model)

    def models(self):
        return MODELS

    def _columns(self, turn):
        columns = []
        for token in turn.tokens:
            if token < FIRST_IMAGE:
                columns.append(token)
            else:
                prepared = images_of(self.family)[token % 4]
                columns += image(prepared.digest, prepared.num_tokens)
        return columns

    def _whole(self, columns):
        columns = list(columns)
        if columns and not isinstance(columns[-1], int):
            digest, place = columns[-1]
            if place + 1 < by_digest(self.family)[digest].num_tokens:
                columns = columns[: len(columns) - place - 1]
        return columns or [1]

    def _shown(self, prompt):
        spans = spans_of(prompt)
        images = [by_digest(self.family)[digest] for _, _, digest in spans]
        config = self.model.config
        return ShownPrompt(
            image_prompt(ids_of(prompt, config), images, config=config, content=spans), tuple(images)
        )

    def _run(self, prompt, turn, **options):
        shown = self._shown(prompt)
        ids = shown.prompt.token_ids
        return run_turn(
            self._seat(), ids, self._options(ids, turn), shown=shown, encoder=self.encoder, **options
        )

    def _options(self, ids, turn):
        return Options.checked(self.model, [ids], turn.num_new, logprobs=NUM_TOP)

    def _check_entry(self, entry, represented):
        assert list(entry.token_ids) == ids_of(represented, self.model.config)
        assert [tuple(span) for span in entry.content] == spans_of(represented)

    def _described(self, prompt):
        return ids_of(prompt, self.model.config), spans_of(prompt)

    def _needs_checkpoints(self):
        return True  # with images, more than the tokens limits what is kept

    def _floor(self, held):
        floor = super()._floor(held)
        if self.model.config.uses_mrope:
            floor = max([floor, *(end for _, end, _ in held.entry.content)])
        return floor

    def _cold(self, columns):
        return cold_logprobs(self.family, columns)


# Images first, last, side by side, the same twice, edited; then each kind of turn.
WITH_IMAGES = [
    Turn("append", [180, 7, 181, 182, 8], 0, 2),
    Turn("append", [9, 180], 0, 2),
    Turn("repeat", [], 0, 2),
    Turn("edit", [181, 5], 400, 2),
    Turn("append", [5, 6], 0, 2),
    *(dataclasses.replace(turn, tokens=[7, 180, 9]) for turn in EACH_KIND),
]


@pytest.mark.parametrize(
    ("family", "policy"),
    [("gemma3_image", OFF), ("gemma3_image", ON), ("qwen3_vl", OFF)],
    ids=["gemma3-keep", "gemma3-evict", "qwen3_vl"],
)
def test_every_turn_with_images_equals_a_cold_refill(family, policy, tmp_path):
    tally = run_sequences(family, policy, 8, tmp_path / "saved", ImageConversations, WITH_IMAGES)
    check_modes(tally, truncates=True, replays=family == "qwen3_vl" or policy.enabled)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [OFF, ON], ids=["keep", "evict"])
@pytest.mark.parametrize("family", MODELS)
def test_every_turn_with_images_equals_a_cold_refill_at_length(family, policy, tmp_path):
    tally = run_sequences(family, policy, 300, tmp_path / "saved", ImageConversations, WITH_IMAGES)
    check_modes(tally, truncates=True, replays=family == "qwen3_vl" or policy.enabled)
