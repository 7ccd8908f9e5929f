"""Log-probabilities with their alternatives, as JSON."""

import json
import math

from jaxinfer import TokenLogprob
from jaxinfer.generation.records import logprob_records
from jaxinfer.testing import toy_tokenizer

LOGPROBS = (
    TokenLogprob(ord("a"), math.log(0.5), 0.0, ((ord("a"), math.log(0.5)), (ord("["), math.log(0.25)))),
    TokenLogprob(ord("\n"), math.log(0.01), -math.inf, ((ord("b"), math.log(0.9)), (0, -math.inf))),
)


def test_records_spell_the_tokens_and_are_json_even_for_impossible_ones():
    records = logprob_records(toy_tokenizer(), LOGPROBS)
    assert json.loads(json.dumps(records, allow_nan=False)) == records
    assert records[0]["token"] == "a"
    assert records[0]["logprob"] == math.log(0.5)
    assert records[0]["top"][1] == {"token_id": ord("["), "token": "[", "logprob": math.log(0.25)}
    assert records[1]["token"] == "\n"
    assert records[1]["processed_logprob"] is None
    assert records[1]["top"][1]["logprob"] is None
