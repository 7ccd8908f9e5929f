import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxinfer.sampling import RowSampling, Sampling, mark_seen, sample, stack_sampling
from jaxinfer.sampling.filters import kept_tokens
from tests.sampling import oracles
from tests.sampling.rows import KINDS, draw, random_logits

SIZE = 1500  # more than the sorted candidates, more than one block

options = st.builds(
    Sampling,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([None, 1, 3, 128, 500, 5000]),
    top_p=st.one_of(st.none(), st.floats(0.0078125, 1.0, width=32)),
    min_p=st.one_of(st.none(), st.floats(0.0, 1.0, width=32)),
    repetition_penalty=st.sampled_from([None, 0.5, 1.3]),
    seed=st.integers(0, 2**64 - 1),
)


@pytest.mark.parametrize("size", [4, 1000])
def test_minus_zero_ties_with_zero_under_top_k_and_top_p(size):
    scaled = np.full((2, size), -50.0, np.float32)
    scaled[:, -4:] = [-0.0, 0.0, -0.0, 0.0]
    kept = kept_tokens(jnp.asarray(scaled), jnp.int32([3, 0]), jnp.float32([1.0, 0.5]))
    assert np.flatnonzero(kept[0]).tolist() == [size - 4, size - 3, size - 2]
    assert np.flatnonzero(kept[1]).tolist() == [size - 4, size - 3]


@settings(max_examples=100, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32), sampling=options)
def test_a_draw_is_one_of_the_kept_tokens_with_its_share_of_their_mass(kind, seed, sampling):
    logits = random_logits(kind, seed, SIZE)
    seen = np.random.default_rng(seed).random(SIZE) < 0.3
    penalised = oracles.penalise(logits, sampling.repetition_penalty or 1.0, seen)
    filters = {f: getattr(sampling, f) for f in ("temperature", "top_k", "top_p", "min_p")}
    ids = oracles.kept(penalised, **filters)
    # Where a mass is within float32's rounding of the edge, on either side, both answers are right.
    for tolerance in (3e-5, -3e-5):
        assume(ids.size == oracles.kept(penalised, **filters, tolerance=tolerance).size)
    result = draw(logits, [sampling] * 4, index=np.arange(4), seen=np.tile(seen, (4, 1)))
    shares = dict(zip(ids.tolist(), oracles.probabilities(penalised, ids, sampling.temperature), strict=True))
    for row, token in enumerate(np.asarray(result.token).tolist()):
        np.testing.assert_allclose(result.processed_logprob[row], np.log(shares[token]), rtol=1e-5, atol=3e-6)
        np.testing.assert_allclose(
            result.logprob[row], oracles.log_softmax(logits)[token], rtol=1e-5, atol=3e-6
        )
    assert (np.asarray(result.logprob) <= 0).all()
    assert (np.asarray(result.processed_logprob) <= 0).all()


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32), penalty=st.sampled_from([None, 0.5, 1.3]))
def test_temperature_0_is_the_argmax_after_the_penalty(kind, seed, penalty):
    logits = random_logits(kind, seed, SIZE)
    seen = np.random.default_rng(seed).random(SIZE) < 0.3
    # The other options leave the likeliest token, so they change nothing.
    samplings = [Sampling(repetition_penalty=penalty), Sampling(0.0, 5, 0.5, 0.5, penalty)]
    result = draw(logits, samplings, seen=np.stack([seen, seen]))
    expected = oracles.penalise(logits, penalty or 1.0, seen).argmax()
    assert result.token.tolist() == [expected, expected]
    assert result.processed_logprob.tolist() == [0.0, 0.0]
    np.testing.assert_allclose(result.logprob[0], oracles.log_softmax(logits)[expected], rtol=1e-5, atol=3e-6)


def chi_square(tokens: np.ndarray, expected: np.ndarray) -> float:
    counts = np.bincount(tokens, minlength=expected.size)
    assert not counts[expected == 0].any()
    live = expected > 0
    return float(((counts[live] - tokens.size * expected[live]) ** 2 / (tokens.size * expected[live])).sum())


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_tokens_come_as_often_as_they_are_likely(filters):
    logits = np.float32([0.3, -1, 2, 1.1, 1.1, 0, -3, 1.7, 0.4, -0.2])
    draws = 20_000
    tokens = np.asarray(draw(logits, [Sampling(**filters, seed=11)] * draws, index=np.arange(draws)).token)
    ids = oracles.kept(logits, **filters)
    expected = np.zeros(10)
    expected[ids] = oracles.probabilities(logits, ids, filters["temperature"])
    assert chi_square(tokens, expected) < 33.7  # one in ten thousand at nine degrees of freedom


def test_draws_with_neighbouring_seeds_are_independent():
    logits = np.zeros(16, np.float32)
    samplings = [Sampling(temperature=1.0, seed=seed) for seed in range(20_000)]
    tokens = np.asarray(draw(logits, samplings).token)
    pairs = tokens[:-1:2] * 16 + tokens[1::2]
    assert chi_square(pairs, np.full(256, 1 / 256)) < 346.0  # one in ten thousand at 255 degrees


def test_flat_draws_reach_every_block_evenly():
    tokens = []
    rows = stack_sampling([Sampling(temperature=1.0, seed=seed) for seed in range(64)])
    logits = jnp.zeros((64, 5000), jnp.float32)

    def step(index, _):
        return index + 1, sample(logits, rows, index=index).token

    _, tokens = jax.lax.scan(step, jnp.zeros(64, jnp.int32), None, length=100)
    assert chi_square(np.asarray(tokens).ravel() // 250, np.full(20, 1 / 20)) < 53.0  # at 19 degrees


MIXED = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=2.0, top_k=3, seed=1),
    Sampling(temperature=2.0, top_k=400, seed=3),
    Sampling(temperature=3.0, top_p=0.9, seed=4),
    Sampling(temperature=0.7, top_k=50, top_p=0.8, seed=5),
    Sampling(temperature=1.0, min_p=0.1, repetition_penalty=1.5, seed=6),
    Sampling(repetition_penalty=1.5),
]


def mixed_batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    kinds = ["normal", "ties", "flat", "two values", "normal", "ties", "normal", "normal"]
    logits = np.stack([random_logits(kind, seed, SIZE) for seed, kind in enumerate(kinds)])
    seen = np.random.default_rng(0).random(logits.shape) < 0.3
    return logits, seen, np.arange(10, 18)


def test_a_row_draws_the_same_alone_in_any_slot_and_among_any_neighbours():
    logits, seen, index = mixed_batch()
    together = draw(logits, MIXED, index=index, seen=seen)
    turned = draw(
        np.roll(logits, 3, 0), MIXED[-3:] + MIXED[:-3], index=np.roll(index, 3), seen=np.roll(seen, 3, 0)
    )
    np.testing.assert_array_equal(np.roll(together.token, 3), turned.token)
    for row, sampling in enumerate(MIXED):
        alone = draw(logits[row], [sampling], index=index[row], seen=seen[row : row + 1])
        assert alone.token[0] == together.token[row], sampling
        np.testing.assert_allclose(alone.logprob[0], together.logprob[row], rtol=1e-6)
        np.testing.assert_allclose(
            alone.processed_logprob[0], together.processed_logprob[row], rtol=1e-5, atol=1e-6
        )


def test_a_row_draws_the_same_without_jit():
    logits, seen, index = mixed_batch()
    expected = draw(logits, MIXED, index=index, seen=seen).token
    with jax.disable_jit():
        np.testing.assert_array_equal(draw(logits, MIXED, index=index, seen=seen).token, expected)


def test_a_row_draws_the_same_under_vmap_and_scan():
    logits, seen, index = mixed_batch()
    expected = draw(logits, MIXED, index=index, seen=seen).token
    operands = jax.tree.map(lambda x: jnp.asarray(x)[:, None], (logits, stack_sampling(MIXED), index, seen))
    operands = (*operands[:2], operands[2].astype(jnp.int32), operands[3])

    def one(logits, rows: RowSampling, index, seen):
        return sample(logits, rows, index=index, seen=seen).token

    np.testing.assert_array_equal(jax.jit(jax.vmap(one))(*operands)[:, 0], expected)
    _, scanned = jax.lax.scan(lambda carry, row: (carry, one(*row)), None, operands)
    np.testing.assert_array_equal(scanned[:, 0], expected)


def test_the_draw_changes_with_the_seed_and_with_the_index():
    logits = np.zeros(SIZE, np.float32)
    base = Sampling(temperature=1.0, seed=1)
    seeds = [1, 2, 1 << 32, (1 << 32) | 1]
    by_seed = draw(logits, [dataclasses.replace(base, seed=seed) for seed in seeds]).token.tolist()
    by_index = draw(logits, [base] * 4, index=np.arange(4)).token.tolist()
    assert len({*by_seed}) == len({*by_index}) == 4
    assert by_seed[0] == by_index[0]


def test_new_values_compile_nothing():
    logits, seen, index = mixed_batch()
    draw(logits, MIXED, index=index, seen=seen)
    before = sample._cache_size()
    draw(-logits, MIXED[::-1], index=index + 5, seen=~seen)
    draw(logits, [Sampling()] * 8, index=index, seen=seen)
    assert sample._cache_size() == before


def primitives(jaxpr, *, into_branches: bool) -> set[str]:
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        if equation.primitive.name != "cond" or into_branches:
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            ):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    found |= primitives(getattr(inner, "jaxpr", inner), into_branches=into_branches)
    return found


def test_a_greedy_batch_neither_sorts_nor_draws():
    logits, rows, index = jnp.zeros((2, SIZE)), stack_sampling([Sampling()] * 2), jnp.zeros(2, jnp.int32)
    traced = jax.make_jaxpr(lambda *a: sample(a[0], a[1], index=a[2]).token)(logits, rows, index).jaxpr
    costly = {"top_k", "random_bits", "cumsum", "scan"}
    assert costly <= primitives(traced, into_branches=True)
    assert not costly & primitives(traced, into_branches=False)


def test_without_options_every_row_is_the_argmax_and_no_draw_is_compiled():
    logits, _, index = mixed_batch()
    logits[3, 5] = np.nan
    index = index.astype(np.int32)
    jax.tree.map(
        np.testing.assert_array_equal,
        sample(logits, None, index=index),
        draw(logits, [Sampling()] * len(logits), index=index),
    )
    traced = jax.make_jaxpr(lambda *a: sample(a[0], None, index=a[1]).token)(logits, index).jaxpr
    assert not {"cond", "top_k", "random_bits"} & primitives(traced, into_branches=True)


@pytest.mark.parametrize("batch", [1, 8])
def test_top_k_1_on_a_tie_is_the_argmax(batch):
    logits = np.float32([1, 3, 2, 3, 3])
    rows = [Sampling(temperature=1.0, top_k=1, seed=seed) for seed in range(batch)]
    assert (
        draw(logits, rows).token.tolist() == [1] * batch == draw(logits, [Sampling()] * batch).token.tolist()
    )


def test_top_k_3_of_tied_logits_draws_exactly_three_tokens():
    rows = [Sampling(temperature=1.0, top_k=3, seed=0)] * 200
    assert set(draw(np.float32([1, 2, 2, 2, 3]), rows, index=np.arange(200)).token.tolist()) == {1, 2, 4}


def test_without_top_k_flat_logits_give_many_tokens():
    rows = [Sampling(temperature=1.0, seed=0)] * 200
    assert len(set(draw(np.zeros(1000, np.float32), rows, index=np.arange(200)).token.tolist())) > 150


def test_the_penalty_comes_before_the_temperature_and_that_before_the_filters():
    probabilities = np.float32([0.5, 0.3, 0.2])
    many = np.arange(300)

    def tokens(**values) -> set[int]:
        seen = np.tile(np.array([True, False, False]), (300, 1))
        rows = [Sampling(**{"temperature": 1.0, **values}, seed=0)] * 300
        return set(draw(np.log(probabilities), rows, index=many, seen=seen).token.tolist())

    # Penalised by 3, the logit log(0.5) becomes log(0.125): no longer the likeliest.
    assert tokens(top_k=1) == {0}
    assert tokens(top_k=1, repetition_penalty=3.0) == {1}
    # Shares 0.5, 0.3, 0.2 become 0.66, 0.24, 0.11 at temperature 0.5, and 0.42, 0.32, 0.26 at 2.
    assert tokens(top_p=0.6) == {0, 1}
    assert tokens(top_p=0.6, temperature=0.5) == {0}
    assert tokens(top_p=0.8, temperature=2.0) == {0, 1, 2}
    assert tokens(min_p=0.5) == {0, 1}
    assert tokens(min_p=0.5, temperature=2.0) == {0, 1, 2}
    # Of the best two, 0.625 and 0.375, top-p 0.6 needs one; of all three it needs two.
    assert tokens(top_p=0.6, top_k=2) == {0}


def test_min_p_keeps_a_token_exactly_at_its_bound():
    rows = [Sampling(temperature=1.0, min_p=0.5, seed=0)] * 100
    logits = np.log(np.float32([0.2, 0.4, 0.1, 0.3]))
    assert set(draw(logits, rows, index=np.arange(100)).token.tolist()) == {0, 1, 3}


def test_raw_logprobs_do_not_change_with_the_options():
    logits = random_logits("normal", 0, 40)
    index = np.arange(64)
    plain = draw(logits, [Sampling(temperature=1.0, seed=0)] * 64, index=index)
    narrow = draw(logits, [Sampling(temperature=1.0, top_p=0.5, seed=0)] * 64, index=index)
    raw = oracles.log_softmax(logits)
    for result in (plain, narrow):
        np.testing.assert_allclose(result.logprob, raw[np.asarray(result.token)], rtol=1e-5)
    np.testing.assert_allclose(plain.processed_logprob, plain.logprob, rtol=1e-4, atol=1e-6)
    assert (np.asarray(narrow.processed_logprob) > np.asarray(narrow.logprob)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_with_bad_logits_is_flagged_and_leaves_its_neighbours_alone(bad):
    logits, seen, index = mixed_batch()
    good = draw(logits, MIXED, index=index, seen=seen)
    logits[[0, 4], 1400] = bad
    result = draw(logits, MIXED, index=index, seen=seen)
    rest = [1, 2, 3, 5, 6, 7]
    assert result.token[jnp.asarray([0, 4])].tolist() == [-1, -1]
    np.testing.assert_array_equal(np.asarray(result.token)[rest], np.asarray(good.token)[rest])
    assert np.isnan(result.logprob).tolist() == [row not in rest for row in range(8)]
    assert np.isnan(result.processed_logprob).tolist() == [row not in rest for row in range(8)]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_k=200, top_p=0.5, seed=0)])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_row_of_nothing_but_nan_or_minus_inf_is_flagged(value, sampling):
    assert draw(np.full(SIZE, value, np.float32), [sampling]).token.tolist() == [-1]


def test_a_penalty_that_overflows_a_logit_is_flagged():
    seen = np.ones((2, 3), bool)
    rows = [Sampling(repetition_penalty=0.1), Sampling(repetition_penalty=10.0)]
    assert draw(np.float32([1e38, 2, 3]), rows, seen=seen).token.tolist() == [-1, 0]


def test_a_penalty_without_seen_tokens_is_flagged_not_ignored():
    assert draw(np.float32([1, 2, 3]), [Sampling(repetition_penalty=1.5), Sampling()]).token.tolist() == [
        -1,
        2,
    ]


def test_padding_is_never_seen_whatever_its_id():
    tokens = jnp.asarray([[3, 1, 0, 0], [2, 2, 4, 1], [-1, 5, 9, 0]], jnp.int32)
    valid = jnp.asarray([[True, True, False, False], [True] * 4, [True, True, True, False]])
    seen = jax.jit(mark_seen)(jnp.zeros((3, 5), bool), tokens, valid)
    assert [np.flatnonzero(row).tolist() for row in np.asarray(seen)] == [[1, 3], [1, 2, 4], []]


def test_marks_add_up():
    seen = jnp.zeros((1, 5), bool)
    for token in (2, 4, 2):
        seen = mark_seen(seen, jnp.asarray([[token]]), jnp.ones((1, 1), bool))
    assert np.flatnonzero(seen[0]).tolist() == [2, 4]


def test_a_short_row_beside_a_long_one_is_penalised_as_it_is_alone():
    tokens = jnp.asarray([[7, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]], jnp.int32)
    valid = jnp.asarray([[True] + [False] * 5, [True] * 6])
    logits = np.float32([5.0, 1, 1, 1, 1, 1, 1, 5.5])  # token 0, the padding, is the best unseen one
    both = mark_seen(jnp.zeros((2, 8), bool), tokens, valid)
    alone = mark_seen(jnp.zeros((1, 8), bool), tokens[:1, :1], valid[:1, :1])
    np.testing.assert_array_equal(both[0], alone[0])
    rows = [Sampling(repetition_penalty=1.5)]
    assert draw(logits, rows * 2, seen=both).token[0] == draw(logits, rows, seen=alone).token[0] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"logits": jnp.zeros((2, 5), jnp.bfloat16)},
            r"logits=\.\.\.\) must be float32 \[B, V\]; got bfloat16",
        ),
        ({"logits": jnp.zeros(5)}, r"logits=\.\.\.\) must be float32 \[B, V\]; got float32 \(5,\)"),
        ({"rows": stack_sampling([Sampling()])}, r"rows=\.\.\.\) must have one entry for each of 2 rows"),
        ({"index": jnp.zeros(1, jnp.int32)}, r"index=\.\.\.\) must be int32 \[2\]; got int32 \(1,\)"),
        ({"index": jnp.zeros(2, jnp.float32)}, r"index=\.\.\.\) must be int32 \[2\]; got float32"),
        ({"seen": jnp.zeros((2, 4), bool)}, r"seen=\.\.\.\) must be bool \(2, 5\); got bool \(2, 4\)"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(change, message):
    arguments = {
        "logits": jnp.zeros((2, 5)),
        "rows": stack_sampling([Sampling()] * 2),
        "index": jnp.zeros(2, jnp.int32),
        "seen": None,
        **change,
    }
    with pytest.raises(ValueError, match=rf"sample\({message}"):
        sample(arguments.pop("logits"), arguments.pop("rows"), **arguments)
