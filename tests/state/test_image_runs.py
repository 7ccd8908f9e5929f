"""Image runs that are read both ways, through the model: what sees what, and which cuts change nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import jaxinfer as ji
from tests.state.harness import (
    BATCH,
    DENSE,
    EVICTS,
    KEEPS_ALL,
    ROUNDING,
    empty,
    forward,
    model,
    sequences,
)

FLAGS = np.array([0, 0, 1, 1, 1, 0, 1, 1, 0], bool)
COLUMNS = len(FLAGS)
LEGAL_CUTS = [end for end in range(1, COLUMNS) if not (FLAGS[end - 1] and FLAGS[end])]


def one_pass(family: str, embeddings: np.ndarray) -> np.ndarray:
    config, params = model(family)
    inputs = ji.StepInputs(
        is_image=np.tile(FLAGS, (BATCH, 1)), embeddings=embeddings, embedding_mask=np.ones((BATCH, 9), bool)
    )
    tokens = np.zeros((BATCH, COLUMNS), np.int32)
    return np.asarray(forward(params, tokens, config=config, inputs=inputs, logits="all", **DENSE)[0])


@pytest.mark.parametrize(
    ("family", "changed_columns"), [("gemma3_image", [2, 3, 4, 5, 6, 7, 8]), ("gemma3", [4, 5, 6, 7, 8])]
)
def test_fault_2_the_last_column_of_an_image_reaches_its_first_and_no_text_before_it(family, changed_columns):
    config, _ = model(family)
    embeddings = np.random.default_rng(0).normal(size=(BATCH, COLUMNS, config.embed_dim)).astype(np.float32)
    changed = embeddings.copy()
    changed[:, 4] *= -1
    difference = np.abs(one_pass(family, embeddings) - one_pass(family, changed)).max((0, 2))
    assert np.flatnonzero(difference > 1e-4).tolist() == changed_columns
    assert not difference[:2].any()


@pytest.mark.parametrize("layout", [KEEPS_ALL, EVICTS], ids=str)
def test_fault_3_every_legal_chunking_of_text_and_images_is_the_single_shot(layout):
    config, params = model("gemma3_image")
    tokens = sequences()[:, :COLUMNS]
    whole = ji.StepInputs(is_image=np.tile(FLAGS, (BATCH, 1)))
    cold, _ = forward(params, tokens, config=config, inputs=whole, logits="all", **DENSE)
    assert LEGAL_CUTS == [1, 2, 5, 6, 8]
    for cuts in itertools.chain.from_iterable(itertools.combinations(LEGAL_CUTS, n) for n in range(6)):
        state = empty(layout, "gemma3_image")
        for start, end in itertools.pairwise((0, *cuts, COLUMNS)):
            count = end - start
            padded = np.zeros((BATCH, COLUMNS), np.int32)
            flags = np.zeros((BATCH, COLUMNS), bool)
            padded[:, :count], flags[:, :count] = tokens[:, start:end], FLAGS[start:end]
            inputs = ji.StepInputs(lengths=np.full(BATCH, count, np.int32), is_image=flags)
            logits, state = forward(
                params, padded, state, config=config, inputs=inputs, logits="all", **DENSE
            )
            np.testing.assert_allclose(
                logits[:, :count], cold[:, start:end], atol=ROUNDING, rtol=ROUNDING, err_msg=f"cuts {cuts}"
            )
        assert np.asarray(state.status).tolist() == [0, 0]
