"""Tiny models whose states are driven append by append, against one pass without a state.

Appends are right-padded to one width, so that each layout of state is compiled once for all tests.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

import jaxinfer as ji
from jaxinfer.testing import random_params, tiny_config

WINDOW = 4  # slack 2
BATCH = 2
WIDTH = 6  # columns of one append, real and padding; PREFILL: of a long one
PREFILL = 12
LENGTH = 40  # tokens of each sequence
CAPACITY = 48
ROUNDING = 1e-5

DENSE = {"implementation": "reference"}  # the quickest to compile; these tests are about rows
forward = jax.jit(ji.forward, static_argnames=("config", "logits", "implementation"))
forward_with_aux = jax.jit(ji.forward_with_aux, static_argnames=("config", "logits", "implementation"))


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the sliding layers of a state are kept."""

    name: str
    policy: ji.KvWindowPolicy
    max_append: int = WIDTH

    def __str__(self) -> str:
        return self.name


KEEPS_ALL = Layout("keeps_all", ji.KvWindowPolicy.off())
EVICTS = Layout("evicts", ji.KvWindowPolicy.on())
# A buffer too short for an append: the step grows it, and shrinks it again.
EVICTS_SHORT = Layout("evicts_short_buffer", ji.KvWindowPolicy.on(), max_append=2)
LAYOUTS = (KEEPS_ALL, EVICTS, EVICTS_SHORT)


@functools.cache
def model(family: str = "gemma3") -> tuple[ji.ModelConfig, object]:
    config = tiny_config(family, window=WINDOW)
    return config, random_params(config, seed=3)


@functools.cache
def sequences(seed: int = 0) -> np.ndarray:
    """Token ids, int32 [BATCH, LENGTH]."""
    config, _ = model()
    return np.random.default_rng(seed).integers(0, config.vocab_size, (BATCH, LENGTH)).astype(np.int32)


def cold_logits(tokens: np.ndarray, family: str = "gemma3") -> np.ndarray:
    """Logits after every token of [BATCH, at most LENGTH] token ids, from one pass without a state."""
    config, params = model(family)
    padded = np.zeros((BATCH, LENGTH), np.int32)
    padded[:, : tokens.shape[1]] = tokens
    logits, _ = forward(params, padded, config=config, logits="all", **DENSE)
    return np.asarray(logits)[:, : tokens.shape[1]]


def empty(layout: Layout, family: str = "gemma3", capacity: int = CAPACITY) -> ji.DecodeState:
    config, _ = model(family)
    return ji.init_state(
        config, batch=BATCH, capacity=capacity, max_append=layout.max_append, kv_window=layout.policy
    )


def append_all(
    state: ji.DecodeState,
    tokens: np.ndarray,
    lengths: Sequence[int],
    family: str = "gemma3",
    *,
    width: int = WIDTH,
) -> tuple[np.ndarray, ji.DecodeState]:
    """Appends `tokens[b, length[b] : length[b] + lengths[b]]` to each row, in a step of `width` columns.

    Returns (logits after each of the step's columns, the state).
    """
    config, params = model(family)
    padded = np.full((BATCH, width), 7, np.int32)
    for row, (start, count) in enumerate(zip(np.asarray(state.length), lengths, strict=True)):
        padded[row, :count] = tokens[row, start : start + count]
    inputs = ji.StepInputs(lengths=np.asarray(lengths, np.int32))
    logits, state = forward(params, padded, state, config=config, inputs=inputs, logits="all", **DENSE)
    return np.asarray(logits), state


def append(
    state: ji.DecodeState,
    tokens: np.ndarray,
    lengths: Sequence[int],
    family: str = "gemma3",
    width: int = WIDTH,
) -> tuple[np.ndarray, ji.DecodeState]:
    """As `append_all`, with logits after each row's last token only, whatever they are for an empty row."""
    logits, state = append_all(state, tokens, lengths, family, width=width)
    return logits[np.arange(BATCH), np.asarray(lengths) - 1], state


def extend(
    state: ji.DecodeState, tokens: np.ndarray, targets: Sequence[int], family: str = "gemma3"
) -> tuple[np.ndarray, ji.DecodeState]:
    """Appends until row b holds `targets[b]` tokens; returns (logits after each row's last one, state)."""
    last = np.zeros((BATCH, model(family)[0].vocab_size), np.float32)
    while (left := np.asarray(targets) - np.asarray(state.length)).any():
        counts = np.minimum(left, WIDTH)
        logits, state = append(state, tokens, counts, family)
        last = np.where((counts > 0)[:, None], logits, last)
    return last, state


def assert_follows(
    logits: np.ndarray, tokens: np.ndarray, lengths: Sequence[int], family: str = "gemma3"
) -> None:
    """Asserts that `logits[b]` are those after the first `lengths[b]` tokens of a cold pass."""
    cold = cold_logits(tokens, family)
    for row, length in enumerate(lengths):
        if length:
            np.testing.assert_allclose(logits[row], cold[row, length - 1], atol=ROUNDING, rtol=ROUNDING)


def live_rows(state: ji.DecodeState) -> list[list[np.ndarray]]:
    """Keys and values of every layer and batch row that hold positions, [K, rows, H] each."""
    found = []
    for layer in state.layers:
        base = np.asarray(getattr(layer, "base", np.zeros(BATCH, np.int32)))
        rows = np.asarray(state.length) - base
        for buffer in (layer.key, layer.value):
            found.append([np.asarray(buffer)[row, :, : rows[row]] for row in range(BATCH)])
    return found


def host_copy(tree: object) -> list[np.ndarray]:
    return [np.array(leaf, copy=True) for leaf in jax.tree.leaves(tree)]


def assert_same_bits(tree: object, copies: list[np.ndarray]) -> None:
    for leaf, copy in zip(jax.tree.leaves(tree), copies, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), copy)
