"""Prompts as columns, each a token id or (image, k): column k of an image; and what a model makes of them
from nothing, without a cache, from numpy's own positions."""

import functools

import jax
import numpy as np

import jaxinfer as ji
from tests.models.vision.oracles import mrope_positions


def image(name, count):
    """The columns of an image of `count` tokens."""
    return [(name, index) for index in range(count)]


def ids_of(columns, config):
    return [column if isinstance(column, int) else config.image_token_id for column in columns]


def spans_of(columns):
    """(start, end, name) of each image."""
    spans = []
    for index, column in enumerate(columns):
        if isinstance(column, int):
            continue
        if column[1] == 0:
            spans.append((index, index + 1, column[0]))
        else:
            spans[-1] = (spans[-1][0], index + 1, column[0])
    return spans


def step_inputs(rows, config, features, grids, width):
    """(tokens int32 [B, width], StepInputs) of rows of columns.

    features: by name, `ImageFeatures`; grids: by name, (rows, columns) in tokens.
    """
    batch, layers = len(rows), 0 if config.vision is None else len(config.vision.deepstack_layers)
    tokens, flags = np.zeros((batch, width), np.int32), np.zeros((batch, width), bool)
    embeddings = np.zeros((batch, width, config.embed_dim), np.float32)
    deepstack = np.zeros((layers, batch, width, config.embed_dim), np.float32)
    positions = np.zeros((3, batch, width), np.int32)
    for row, columns in enumerate(rows):
        count = len(columns)
        tokens[row, :count] = ids_of(columns, config)
        flags[row, :count] = [not isinstance(column, int) for column in columns]
        grids_here = [grids[name] for _, _, name in spans_of(columns)]
        if count:
            positions[:, row, :count] = place_images(flags[row, :count], spans_of(columns), grids_here)
        for index, column in enumerate(columns):
            if not isinstance(column, int):
                name, place = column
                embeddings[row, index] = features[name].embeddings[place]
                if layers:
                    deepstack[:, row, index] = features[name].deepstack[:, place]
    inputs = ji.StepInputs(
        lengths=np.array([len(columns) for columns in rows], np.int32),
        is_image=flags,
        embeddings=embeddings,
        embedding_mask=flags,
        positions=positions if config.uses_mrope else None,
        deepstack=deepstack if layers else None,
    )
    return tokens, inputs


def place_images(flags, spans, grids):
    """The positions of the oracle; where its flags alone would join images, one after another."""
    parts, at, column = [], 0, 0
    for (start, end, _), grid in zip(spans, grids, strict=True):
        text = np.arange(at, at + start - column)
        at += len(text)
        parts += [np.stack([text] * 3), at + mrope_positions(np.ones(end - start, bool), [grid])]
        at, column = at + max(grid), end
    parts.append(np.stack([np.arange(at, at + len(flags) - column)] * 3))
    return np.concatenate(parts, axis=1)


@functools.partial(jax.jit, static_argnames=("config", "mode"))
def forward_alone(params, tokens, inputs, *, config, mode):
    logits, _ = ji.forward(params, tokens, config=config, inputs=inputs, logits=mode)
    return logits
