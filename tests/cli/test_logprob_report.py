"""Log-probabilities with their alternatives, as a table."""

import math

from jaxinfer import TokenLogprob
from jaxinfer.cli.logprob_report import logprob_table
from jaxinfer.cli.terminal import render
from jaxinfer.testing import toy_tokenizer

LOGPROBS = (
    TokenLogprob(ord("a"), math.log(0.5), 0.0, ((ord("a"), math.log(0.5)), (ord("["), math.log(0.25)))),
    TokenLogprob(ord("\n"), math.log(0.01), -math.inf, ((ord("b"), math.log(0.9)), (0, -math.inf))),
)


def test_the_table_shows_probabilities_and_alternatives_one_line_a_token():
    lines = render(logprob_table(toy_tokenizer(), LOGPROBS)).splitlines()
    assert lines[0].split() == ["TOKEN", "LOGPROB", "PROBABILITY", "MOST", "LIKELY"]
    assert len(lines) == 3
    assert lines[1].split() == ["'a'", "-0.693", "██████", "50%", "'a'", "50%", "'['", "25%"]
    assert lines[2].split()[:3] == ["'\\n'", "-4.605", "1%"]
