"""Tiny models compute something: their logits are spread, every weight counts, the seed decides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models import forward, param_shapes
from jaxinfer.testing import TINY_FAMILIES, random_params, tiny_config

TOKENS = np.random.RandomState(0).randint(0, 256, (2, 24)).astype(np.int32)


def logits(params, config):
    with jax.default_matmul_precision("highest"):
        return np.asarray(forward(params, TOKENS, config=config, logits="all")[0])


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_toy_logits_have_a_standard_deviation_of_at_least_one(family):
    config = tiny_config(family)
    out = logits(random_params(config, 0), config)
    assert np.isfinite(out).all()
    assert out.std() >= 1
    echoed = np.mean(out.argmax(-1) == TOKENS)
    assert echoed < 0.5, "most tokens predict themselves"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_params_have_the_shapes_and_dtypes_of_the_config(dtype):
    config = tiny_config("gemma3", dtype=dtype)
    params, shapes = random_params(config), param_shapes(config)
    assert jax.tree.structure(params) == jax.tree.structure(shapes)
    found = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(params)]
    assert found == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes)]


def test_every_weight_changes_the_logits():
    config = tiny_config("gemma3")
    params = random_params(config)
    leaves, structure = jax.tree.flatten(params)
    before = logits(params, config)
    for index, leaf in enumerate(leaves):
        changed = [*leaves[:index], jnp.zeros_like(leaf), *leaves[index + 1 :]]
        assert np.abs(logits(structure.unflatten(changed), config) - before).max() > 1e-3


def test_the_seed_decides_every_weight():
    config = tiny_config("llama")
    first, again, other = (jax.tree.leaves(random_params(config, seed)) for seed in (1, 1, 2))
    assert all(bool((a == b).all()) for a, b in zip(first, again, strict=True))
    assert not any(bool((a == b).any()) for a, b in zip(first, other, strict=True) if a.dtype == jnp.float32)


def test_changes_replace_fields_of_the_config():
    config = tiny_config("mistral", window=3, vocab_size=300)
    assert config.vocab_size == 300
    assert {layer.window for layer in config.layers} == {3}


def test_an_unknown_family_is_refused_by_name():
    with pytest.raises(ValueError, match=r"must be one of .*'llama'.*; got 'nope'"):
        tiny_config("nope")
