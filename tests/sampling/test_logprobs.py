import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling import token_logprobs, top_logprobs
from tests.sampling import oracles
from tests.sampling.rows import KINDS, random_logits


@pytest.mark.parametrize("size", [1, 40, 2500])
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_the_log_softmax_at_most_0_and_sum_to_1(kind, size):
    for seed in range(5):
        logits = random_logits(kind, seed, size)
        found = np.asarray(token_logprobs(jnp.tile(logits, (size, 1)), jnp.arange(size, dtype=jnp.int32)))
        assert found.max() <= 0
        np.testing.assert_allclose(np.exp(found.astype(np.float64)).sum(), 1.0, rtol=2e-6)
        np.testing.assert_allclose(found, oracles.log_softmax(logits), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_top_tokens_come_likeliest_first_ties_by_lowest_id(kind):
    logits = random_logits(kind, 1, 60).reshape(2, 1, 30)
    ids, logprobs = jax.jit(top_logprobs, static_argnums=1)(logits, 7)
    assert (ids.shape, ids.dtype, logprobs.dtype) == ((2, 1, 7), jnp.int32, jnp.float32)
    for row in range(2):
        np.testing.assert_array_equal(ids[row, 0], oracles.ranked(logits[row, 0])[:7])
    np.testing.assert_array_equal(
        logprobs, np.stack([token_logprobs(logits, ids[..., i]) for i in range(7)], -1)
    )


def test_leading_axes_are_kept():
    logits = jnp.zeros((2, 3, 4), jnp.float32)
    np.testing.assert_allclose(
        token_logprobs(logits, jnp.zeros((2, 3), jnp.int32)), np.full((2, 3), -np.log(4))
    )


def test_an_id_out_of_range_has_no_logprob():
    logits = jnp.zeros((3, 4), jnp.float32)
    assert np.isnan(token_logprobs(logits, jnp.asarray([-1, 3, 4]))).tolist() == [True, False, True]


@pytest.mark.parametrize("k", [0, -1, 5])
def test_more_tokens_than_there_are_is_refused(k):
    with pytest.raises(ValueError, match=r"top_logprobs\(k=\.\.\.\) must be in \[1, V = 4\]; got"):
        top_logprobs(jnp.zeros((1, 4)), k)
