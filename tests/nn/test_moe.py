"""The mixture-of-experts part: routing, weights, the shared expert, and what padding must not change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer as ji
from jaxinfer.config import MoeConfig
from jaxinfer.nn.mlp import MlpParams
from jaxinfer.nn.moe import MoeParams, moe, route
from jaxinfer.testing import random_params, tiny_config

E, D, F, K = 6, 16, 12, 2
CONFIG = MoeConfig(num_experts=E, num_experts_per_token=K, mlp_dim=F)


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def draw(*shape, seed=0, scale=1.0):
    return (np.random.RandomState(seed).randn(*shape) * scale).astype(np.float32)


def softmax(x):
    shares = np.exp(x - x.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def gated(x, gate, up, down):
    hidden = x @ gate.T
    return (hidden / (1 + np.exp(-hidden)) * (x @ up.T)) @ down.T


def params(**changes):
    return MoeParams(draw(E, D, seed=1), draw(E, 2, F, D, seed=2) / 4, draw(E, D, F, seed=3) / 4, **changes)


@pytest.mark.parametrize("normalize", [True, False])
def test_each_token_gets_its_greatest_shares_of_a_softmax_over_all_experts(normalize):
    x, weights = draw(2, 5, D), params()
    config = MoeConfig(E, K, F, normalize_weights=normalize)
    ids, shares = route(jnp.asarray(weights.router), jnp.asarray(x), config)
    full = softmax(x @ weights.router.T)
    expected = np.argsort(-full, axis=-1)[..., :K]
    np.testing.assert_array_equal(ids, expected)
    chosen = np.take_along_axis(full, expected, -1)
    if normalize:
        chosen = chosen / chosen.sum(-1, keepdims=True)
    np.testing.assert_allclose(shares, chosen, rtol=1e-5)


def test_equal_shares_go_to_the_lower_expert():
    ids, shares = route(jnp.zeros((E, D)), jnp.asarray(draw(1, 3, D)), CONFIG)
    np.testing.assert_array_equal(ids, np.broadcast_to(np.arange(K), (1, 3, K)))
    np.testing.assert_allclose(shares, 1 / K)


@pytest.mark.parametrize("shared", [False, True])
def test_output_is_the_weighted_sum_of_the_chosen_experts_and_the_gated_shared_one(shared):
    x, weights = draw(2, 5, D), params()
    if shared:
        mlp = MlpParams(draw(2, 20, D, seed=4) / 4, draw(D, 20, seed=5) / 4)
        weights = weights.replace(shared=mlp, shared_gate=draw(1, D, seed=6))
    full = softmax(x @ weights.router.T)
    expected = np.zeros_like(x)
    for place in np.ndindex(2, 5):
        top = np.argsort(-full[place])[:K]
        for expert in top:
            out = gated(x[place], *weights.gate_up[expert], weights.down[expert])
            expected[place] += full[place][expert] / full[place][top].sum() * out
        if shared:
            gate = 1 / (1 + np.exp(-x[place] @ weights.shared_gate[0]))
            expected[place] += gate * gated(x[place], *weights.shared.gate_up, weights.shared.down)
    got = moe(jax.tree.map(jnp.asarray, weights), jnp.asarray(x), "silu", CONFIG)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_padding_and_other_rows_change_nothing_in_a_model_with_experts():
    base = tiny_config("qwen3")
    parts = ("moe", "dense", "moe")
    config = dataclasses.replace(
        base,
        moe=MoeConfig(num_experts=5, num_experts_per_token=2, mlp_dim=24, shared_mlp_dim=32),
        layers=tuple(dataclasses.replace(base.layers[0], mlp=part) for part in parts),
    )
    weights = random_params(config)
    tokens = np.random.RandomState(0).randint(0, config.vocab_size, (3, 9)).astype(np.int32)
    lengths = np.array([9, 4, 0], np.int32)
    garbage = np.where(np.arange(9) < lengths[:, None], tokens, 7).astype(np.int32)
    state = ji.init_state(config, batch=3, capacity=16)
    logits, state = ji.forward(
        weights, garbage, state, config=config, inputs=ji.StepInputs(lengths=lengths), logits="all"
    )
    alone = ji.init_state(config, capacity=16)
    for row in (0, 1):
        expected, _ = ji.forward(
            weights, tokens[row : row + 1, : lengths[row]], alone, config=config, logits="all"
        )
        np.testing.assert_allclose(logits[row, : lengths[row]], expected[0], atol=2e-5)
