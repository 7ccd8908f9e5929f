import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.sampling import prefix
from tests.sampling import oracles
from tests.sampling.rows import KINDS, random_logits

SIZE = 1500  # more than the sorted candidates, more than one block
TOLERANCE = 2e-6


def kept_rows(logits: np.ndarray, top_k: list[int], top_p: list[float], *, candidates: int) -> np.ndarray:
    """bool [B, V] by `kept_prefix` with that many sorted candidates."""
    return np.asarray(
        _compiled(candidates)(logits, jnp.asarray(top_k, jnp.int32), jnp.asarray(top_p, jnp.float32))
    )


@functools.cache
def _compiled(candidates: int):
    def keep(logits, top_k, top_p):
        weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
        before, prefix.CANDIDATES = prefix.CANDIDATES, candidates  # read while tracing
        try:
            found = prefix.kept_prefix(logits, weights, top_k, top_p)
        finally:
            prefix.CANDIDATES = before
        return found.keeps(prefix.sort_key(logits))

    return jax.jit(keep)


top_ks = st.sampled_from([0, 1, 2, 5, 127, 128, 129, 700, SIZE, SIZE + 1, 2**31 - 1])
top_ps = st.one_of(st.just(1.0), st.floats(1e-6, 1.0, width=32))


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32), top_k=top_ks, top_p=top_ps)
def test_what_is_kept_is_what_one_sort_keeps(kind, seed, top_k, top_p):
    logits = random_logits(kind, seed, SIZE)
    mask = kept_rows(logits[None], [top_k], [top_p], candidates=128)[0]
    most = oracles.kept(logits, temperature=1.0, top_k=top_k or None, top_p=top_p)
    least = oracles.kept(logits, temperature=1.0, top_k=top_k or None, top_p=top_p, tolerance=TOLERANCE)
    assert least.size <= mask.sum() <= most.size
    assert mask[oracles.ranked(logits)[: mask.sum()]].all()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32), kinds=st.lists(st.sampled_from(KINDS), min_size=4, max_size=4), data=st.data()
)
def test_the_search_and_the_sort_keep_the_same_tokens_tie_for_tie(seed, kinds, data):
    logits = np.stack([random_logits(kind, seed + row, SIZE) for row, kind in enumerate(kinds)])
    top_k = [data.draw(top_ks) for _ in kinds]
    top_p = [data.draw(top_ps) for _ in kinds]
    by_search = kept_rows(logits, top_k, top_p, candidates=1)
    np.testing.assert_array_equal(by_search, kept_rows(logits, top_k, top_p, candidates=128))
    np.testing.assert_array_equal(by_search, kept_rows(logits, top_k, top_p, candidates=1024))


def test_top_k_leaves_exactly_k_of_tied_logits_the_lowest_ids_first():
    assert kept_rows(np.float32([[1, 2, 2, 2, 3]]), [3], [1.0], candidates=128).tolist() == [
        [False, True, True, False, True]
    ]


@pytest.mark.parametrize("candidates", [1, 128])
@pytest.mark.parametrize("top_p", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_top_p_of_n_tenths_keeps_n_of_ten_equal_tokens(top_p, candidates):
    mask = kept_rows(np.zeros((1, 10), np.float32), [0], [top_p], candidates=candidates)[0]
    assert mask.tolist() == [i < round(10 * top_p) for i in range(10)]


@pytest.mark.parametrize("candidates", [1, 128])
def test_top_p_counts_the_mass_of_what_top_k_left(candidates):
    logits = np.log(np.float32([[0.4, 0.3, 0.2, 0.1]]))
    # Of the three left: 4/9, 3/9, 2/9.
    sizes = [
        kept_rows(logits, [3], [p], candidates=candidates).sum() for p in (0.43, 0.45, 0.7, 7 / 9, 0.79, 1.0)
    ]
    assert sizes == [1, 2, 2, 2, 3, 3]


def test_sort_keys_order_as_the_floats_do():
    values = np.float32([-np.inf, -3e38, -1.5, -1e-30, -0.0, 0.0, 1e-30, 1.5, 3e38, np.inf])
    keys = np.asarray(prefix.sort_key(jnp.asarray(values))).astype(np.int64)
    np.testing.assert_array_equal(
        np.sign(np.diff(keys)), np.sign(np.diff(values.astype(np.float64), 1)[:].clip(-1, 1))
    )
