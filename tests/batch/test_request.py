"""Input lines: what is taken, and the one sentence that each bad one gets."""

import json
import re

import pytest

from jaxinfer import Sampling
from jaxinfer.batch.lines import MAX_LINE_BYTES
from jaxinfer.batch.request import BadRow, Defaults, Request, parse_row, row_seed

DEFAULTS = Defaults(7, Sampling(temperature=0.5, top_k=3, seed=11), ("x",), 2)


def parse(fields, number=5, defaults=DEFAULTS):
    line = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return parse_row(line, number, defaults)


def test_a_row_that_says_nothing_gets_the_defaults_its_line_number_and_a_seed_of_its_own():
    sampling = Sampling(temperature=0.5, top_k=3, seed=row_seed(11, 5))
    assert parse({"prompt": "hi"}) == Request(5, 5, "hi", None, 7, sampling, ("x",), 2)


def test_what_a_row_says_comes_before_the_defaults():
    options = {
        "temperature": 1,
        "top_k": None,
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 2,
        "seed": 3,
    }
    messages = [{"role": "user", "content": "hi"}]
    row = {"id": "a", "messages": messages, "max_new_tokens": 9, "stop": "y", "logprobs": None, **options}
    assert parse(row) == Request("a", 5, None, messages, 9, Sampling(**options), ("y",), None)


def test_a_seed_is_made_of_the_jobs_and_the_rows_id_alone():
    assert (
        parse({"id": "a", "prompt": "hi"}, number=1).sampling == parse({"id": "a", "prompt": "ho"}).sampling
    )
    seeds = {row_seed(job, row_id) for job in (0, 1) for row_id in ("a", "b", 1, "1")}
    assert len(seeds) == 8
    assert max(seeds) < 2**53


@pytest.mark.parametrize("line", [b'\xef\xbb\xbf{"prompt": "hi"}', b'{"prompt": "hi"}\r'])
def test_a_byte_order_mark_in_front_of_the_file_and_carriage_returns_do_not_matter(line):
    assert parse(line, number=1).prompt == "hi"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"", "the line is blank"),
        (b" \t\r", "the line is blank"),
        (b"{", "the line is not JSON: .* at column 2"),
        (b'{"prompt": "\xff"}', "the line is not UTF-8 text: invalid start byte at byte 12"),
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
        (b"[" * 100_000, "the line is nested too deeply"),
        (b'{"id": ' + b"1" * 5000 + b', "prompt": ""}', "not JSON that can be read"),
        (b'{"temperature": NaN, "prompt": ""}', "NaN is no JSON number"),
        (b'{"prompt": "a", "prompt": "b"}', "field 'prompt' is there twice"),
        (b'"hi"', 'the line must be a JSON object; got "hi"'),
        (b" " * (MAX_LINE_BYTES + 1), "the line is longer than 16777216 bytes"),
    ],
)
def test_a_line_that_is_no_object_is_a_bad_row_of_its_number(line, error):
    bad = parse(line)
    assert isinstance(bad, BadRow)
    assert (bad.id, bad.line) == (5, 5)
    assert re.search(error, bad.error)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, "a row needs prompt or messages; got neither"),
        ({"prompt": "a", "messages": []}, "a row needs prompt or messages; got both"),
        ({"prompt": ["a"]}, 'prompt must be a string; got ["a"]'),
        ({"messages": []}, "messages must be a list of objects with a role, not an empty one; got []"),
        ({"messages": [{"content": "hi"}]}, "messages must be a list of objects with a role"),
        ({"prompt": "a", "temprature": 1}, "unknown field 'temprature'; a row may have id, prompt, messages"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1; got 0"),
        (
            {"prompt": "a", "max_new_tokens": True},
            "max_new_tokens must be an integer of at least 1",
        ),
        ({"prompt": "a", "stop": [""]}, "stop must be a string or a list of strings, none of them empty"),
        ({"prompt": "a", "logprobs": 129}, "logprobs must be null or an integer in 0..128; got 129"),
        ({"prompt": "a", "temperature": "hot"}, "temperature must be a number; got 'hot'"),
        ({"prompt": "a", "temperature": 10**400}, "temperature must be a number; got 1000"),
        ({"prompt": "a", "top_k": 0}, "top_k must be None (off) or at least 1; got 0"),
        ({"prompt": "a", "seed": -1}, "seed must be "),
    ],
)
def test_a_bad_field_is_named_in_one_short_sentence(fields, error):
    bad = parse({"id": "a", **fields})
    assert isinstance(bad, BadRow)
    assert bad.id == "a"
    assert bad.error.startswith(error)
    assert "\n" not in bad.error
    assert len(bad.error) <= 300


@pytest.mark.parametrize("value", [None, True, 1.5, ["a"]])
def test_an_id_is_a_string_or_an_integer(value):
    bad = parse({"id": value, "prompt": "a"})
    assert (bad.id, bad.error) == (5, f"id must be a string or an integer; got {json.dumps(value)}")


def test_defaults_are_checked_as_rows_are():
    with pytest.raises(ValueError, match="max_new_tokens must be an integer of at least 1; got 0"):
        Defaults(max_new_tokens=0)
