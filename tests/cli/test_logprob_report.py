"""Log-probabilities with their alternatives, as JSON and as a table."""

import json
import math

from jaxinfer import TokenLogprob
from jaxinfer.cli.logprob_report import logprob_records, logprob_table
from jaxinfer.cli.terminal import render
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


def test_the_table_shows_probabilities_and_alternatives_one_line_a_token():
    lines = render(logprob_table(toy_tokenizer(), LOGPROBS)).splitlines()
    assert lines[0].split() == ["TOKEN", "LOGPROB", "PROBABILITY", "MOST", "LIKELY"]
    assert len(lines) == 3
    assert lines[1].split() == ["'a'", "-0.693", "██████", "50%", "'a'", "50%", "'['", "25%"]
    assert lines[2].split()[:3] == ["'\\n'", "-4.605", "1%"]
