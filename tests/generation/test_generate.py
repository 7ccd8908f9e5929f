"""`generate`: greedy equals stepping by hand, rows do not feel each other, compiles are bounded."""

import jax
import numpy as np
import pytest

import jaxinfer as ji
from jaxinfer.generation import plan_prefill_buckets, prefill, traces
from jaxinfer.generation.rows import Options, RowOptions, continue_rows, end_token_ids
from jaxinfer.testing import tiny_config, tiny_model

MODEL = tiny_model("llama", seed=0)
PROMPTS = ["12345", "a", "the quick brown fox jumps over the lazy dog"]


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def greedy_by_hand(model, ids, count):
    state = ji.init_state(model.config, capacity=128)
    logits, state = ji.forward(model.params, np.array([ids]), state, config=model.config)
    out = []
    for _ in range(count):
        out.append(int(logits[0].argmax()))
        if out[-1] in model.tokenizer.eos_token_ids:
            break
        logits, state = ji.forward(model.params, np.array([[out[-1]]]), state, config=model.config)
    return tuple(out)


@pytest.fixture(scope="module")
def batch():
    with jax.default_matmul_precision("highest"):
        return ji.generate(MODEL, PROMPTS, max_new_tokens=12, logprobs=3)


def test_greedy_equals_stepping_by_hand(batch):
    for prompt, got in zip(PROMPTS, batch, strict=True):
        assert got.token_ids == greedy_by_hand(MODEL, got.prompt_token_ids, 12)
        assert got.prompt_token_ids == tuple(MODEL.tokenizer.encode(prompt))
        assert got.text == MODEL.tokenizer.decode(got.token_ids)


def test_a_row_alone_equals_the_row_in_a_batch(batch):
    for prompt, together in zip(PROMPTS, batch, strict=True):
        (alone,) = ji.generate(MODEL, prompt, max_new_tokens=12, logprobs=3)
        assert alone.token_ids == together.token_ids
        np.testing.assert_allclose(
            [entry.logprob for entry in alone.logprobs],
            [entry.logprob for entry in together.logprobs],
            atol=1e-4,
        )


def test_logprobs_are_raw_and_alternatives_come_best_first(batch):
    for got in batch:
        assert [entry.token_id for entry in got.logprobs] == list(got.token_ids)
        for entry in got.logprobs:
            values = [value for _, value in entry.top]
            assert values == sorted(values, reverse=True)
            assert entry.logprob <= 0
            assert entry.top[0] == (entry.token_id, pytest.approx(entry.logprob, abs=1e-5))  # greedy


def test_seeded_rows_do_not_depend_on_batch_mates_or_order():
    hot = [ji.Sampling(temperature=1.5, seed=seed) for seed in (7, 8, 9)]
    together = ji.generate(MODEL, PROMPTS, max_new_tokens=12, sampling=hot)
    swapped = ji.generate(MODEL, PROMPTS[::-1], max_new_tokens=12, sampling=hot[::-1])[::-1]
    alone = [
        ji.generate(MODEL, prompt, max_new_tokens=12, sampling=one)[0]
        for prompt, one in zip(PROMPTS, hot, strict=True)
    ]
    assert [row.token_ids for row in together] == [row.token_ids for row in swapped]
    assert [row.token_ids for row in together] == [row.token_ids for row in alone]
    assert len({row.token_ids for row in together}) == 3


def test_a_repetition_penalty_ignores_padding_and_batch_mates():
    penalised = ji.Sampling(repetition_penalty=1.8)
    together = ji.generate(MODEL, PROMPTS, max_new_tokens=12, sampling=penalised)
    (alone,) = ji.generate(MODEL, PROMPTS[1], max_new_tokens=12, sampling=penalised)
    assert together[1].token_ids == alone.token_ids
    (plain,) = ji.generate(MODEL, PROMPTS[1], max_new_tokens=12)
    assert plain.token_ids != alone.token_ids


def test_stream_pieces_join_to_the_text_and_come_in_several():
    pieces = {row: [] for row in range(3)}
    reasons = {}

    def take(chunk):
        pieces[chunk.row].append(chunk.text)
        if chunk.finish_reason:
            reasons[chunk.row] = chunk.finish_reason

    got = ji.generate(MODEL, PROMPTS, max_new_tokens=12, stream=take)
    for row, answer in enumerate(got):
        assert "".join(pieces[row]) == answer.text
        assert reasons[row] == answer.finish_reason
    assert any(len(row) > 2 for row in pieces.values())


def test_a_stop_string_ends_its_row_only(batch):
    text = batch[0].text
    stop = text[4:6]
    stopped = ji.generate(MODEL, PROMPTS, max_new_tokens=12, stop=[stop])
    assert stopped[0].finish_reason == "stop"
    assert stopped[0].stop == stop
    assert stopped[0].text == text[: text.find(stop)]
    for row in (1, 2):
        if stop not in batch[row].text:
            assert stopped[row].text == batch[row].text


def test_either_id_of_an_eos_list_stops(batch):
    import dataclasses

    ids = batch[0].token_ids
    config = dataclasses.replace(MODEL.config, eos_token_ids=(ids[5], ids[2]))
    model = dataclasses.replace(MODEL, config=config)
    (got,) = ji.generate(model, PROMPTS[0], max_new_tokens=12)
    first = min(ids.index(ids[5]), ids.index(ids[2]))
    assert got.token_ids == ids[: first + 1]
    assert got.finish_reason == "stop"


def test_a_stop_string_that_the_mark_of_an_unfinished_character_completes_is_a_stop():
    (plain,) = ji.generate(MODEL, PROMPTS[0], max_new_tokens=12)
    cut = next(n for n in range(1, 13) if MODEL.tokenizer.decode(plain.token_ids[:n]).endswith("\ufffd"))
    (got,) = ji.generate(MODEL, PROMPTS[0], max_new_tokens=cut, stop=["\ufffd"])
    assert (got.finish_reason, got.stop) == ("stop", "\ufffd")
    assert got.text == plain.text[: plain.text.index("\ufffd")]


def test_fault_34_the_ends_of_the_config_and_of_the_tokenizer_both_stop():
    import dataclasses

    model = dataclasses.replace(MODEL, config=dataclasses.replace(MODEL.config, eos_token_ids=(1, 106)))
    assert end_token_ids(model) == tuple(sorted({1, 106, *MODEL.tokenizer.eos_token_ids}))
    assert len(end_token_ids(model)) > 2


def test_max_new_tokens_is_exact(batch):
    for count in (1, 2, 5):
        (got,) = ji.generate(MODEL, PROMPTS[0], max_new_tokens=count)
        assert got.token_ids == batch[0].token_ids[:count]
        assert got.finish_reason == "length"


def test_prompt_logprobs_equal_a_log_softmax_of_the_logits():
    (got,) = ji.generate(MODEL, PROMPTS[0], max_new_tokens=1, prompt_logprobs=True)
    ids = np.array([got.prompt_token_ids])
    logits, _ = ji.forward(MODEL.params, ids, config=MODEL.config, logits="all")
    scores = np.asarray(jax.nn.log_softmax(logits))[0, np.arange(ids.shape[1] - 1), ids[0, 1:]]
    np.testing.assert_allclose(got.prompt_logprobs, scores, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(prompts=[]), "at least one prompt"),
        (dict(prompts=[[]]), "row 0 has no tokens"),
        (dict(prompts=[[1, 2], [10**6]]), "row 1 has token id 1000000"),
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(max_new_tokens=10**6), "positions"),
        (dict(stop=[""]), "not empty"),
        (dict(logprobs=-1), "logprobs"),
        (dict(sampling=[ji.Sampling()]), "one for each of 3"),
    ],
)
def test_bad_calls_are_refused(change, message):
    call = dict(prompts=PROMPTS, max_new_tokens=4) | change
    with pytest.raises(ValueError, match=message):
        ji.generate(MODEL, **call)


def test_weights_that_are_not_numbers_are_an_error():
    import dataclasses

    broken = dataclasses.replace(
        MODEL, params=MODEL.params.replace(final_norm=MODEL.params.final_norm * np.nan)
    )
    with pytest.raises(FloatingPointError, match="row 0: the logits after 0 new tokens are not numbers"):
        ji.generate(broken, "hello", max_new_tokens=3)


def test_each_row_has_its_own_options_and_padding_changes_nothing():
    rows = [MODEL.tokenizer.encode(prompt) for prompt in PROMPTS[:2]]
    samplings = [ji.Sampling(), ji.Sampling(repetition_penalty=1.5)]
    longer, shorter = ji.generate(MODEL, rows, max_new_tokens=9, sampling=samplings)
    stop = longer.text[3:5]
    options = Options(
        (
            RowOptions(9, stop=(stop,), logprobs=3),
            RowOptions(4, samplings[1]),
        ),
        end_token_ids(MODEL),
    )
    state = ji.init_state(MODEL.config, batch=4, capacity=64)
    logits, state = prefill(MODEL.params, [*rows, (), ()], state, config=MODEL.config, donate=True)
    counted = []
    run, answers = continue_rows(MODEL, logits, state, rows, options, on_tokens=counted.append)
    first, second = (answer.result() for answer in answers)
    assert first.text == longer.text[: longer.text.index(stop)]
    assert [len(entry.top) for entry in first.logprobs] == [3] * len(first.token_ids)
    assert second.token_ids == shorter.token_ids[:4]
    assert second.logprobs is None
    assert run.count.tolist()[2:] == [0, 0]
    assert sum(counted) == run.count.sum()


def test_compiles_are_bounded_by_the_bucket_plan_and_a_second_pass_compiles_nothing():
    rng = np.random.RandomState(0)
    rows = [rng.randint(5, 100, size=length).tolist() for length in range(1, 201)]

    def options(index):
        return dict(
            sampling=ji.Sampling(temperature=0.5 * (index % 2), top_k=index % 3 or None, seed=index),
            stop=["zq"] if index % 5 == 0 else [],
            stream=(lambda chunk: None) if index % 7 == 0 else None,
        )

    def run_all():
        for index, row in enumerate(rows):
            ji.generate(MODEL, [row], max_new_tokens=2, **options(index))

    before = traces()
    run_all()
    after = traces()
    new = {name: after[name] - before.get(name, 0) for name in after}
    shapes = {size for length in range(1, 201) for size in plan_prefill_buckets(length)}
    # Each shape with and without logits at the end; one capacity, so one program for the rest.
    assert new["prefill"] <= 2 * len(shapes)
    # One where every row takes the argmax, one for all that draw.
    assert new["decode"] <= 2
    assert new["first_token"] <= 2
    run_all()
    assert traces() == after


def test_compiles_are_bounded_with_eviction_penalties_and_alternatives_too():
    layers = tiny_config("gemma3").layers[1:]  # one that evicts, one that keeps all
    model = tiny_model("gemma3", seed=1, kv_window=ji.KvWindowPolicy.on(), layers=layers)
    rng = np.random.RandomState(0)
    lengths = (1, 15, 16, 17, 31, 32, 33)  # both sides of the buckets' edges

    def run_all():
        for index, length in enumerate(lengths):
            row = rng.randint(5, 100, size=length).tolist()
            options = {}
            if index % 2:
                options = dict(sampling=ji.Sampling(repetition_penalty=1.3), logprobs=3 + index % 4 // 3)
            ji.generate(model, [row], max_new_tokens=2, **options)

    before = traces()
    run_all()
    after = traces()
    new = {name: after[name] - before.get(name, 0) for name in after}
    shapes = {size for length in lengths for size in plan_prefill_buckets(length)}
    assert new["prefill"] <= 2 * len(shapes)
    assert new["decode"] <= 2  # plain; penalised with 4 alternatives
    run_all()
    assert traces() == after
