"""Attention of every column to every other equals its formula, however the queries are cut."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.ops import full_attention

RANDOM = np.random.default_rng(3)


def formula(query, key, value, length, scale):
    scores = scale * np.einsum("qnh,knh->nqk", query, key)[:, :, :length]
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("nqk,knh->qnh", weights, value[:length])


@pytest.mark.parametrize("block_scores", [1 << 22, 24 * 6], ids=["one block", "four blocks"])
@pytest.mark.parametrize("length", [None, 1, 17, 24])
def test_it_is_the_formula(block_scores, length, monkeypatch):
    monkeypatch.setattr(sys.modules["jaxinfer.ops.full_attention"], "_BLOCK_SCORES", block_scores)
    query, key, value = RANDOM.standard_normal((3, 24, 3, 10))
    if length is not None:
        key[length:], value[length:] = 1e9, 1e9
    arrays = (jnp.asarray(x, jnp.float32) for x in (query, key, value))
    count = None if length is None else jnp.int32(length)
    with jax.default_matmul_precision("highest"):
        out = full_attention(*arrays, count, softmax_scale=0.7)
    real = 24 if length is None else length
    expected = formula(query, key, value, real, 0.7)
    np.testing.assert_allclose(out[:real], expected[:real], rtol=0, atol=2e-6)
