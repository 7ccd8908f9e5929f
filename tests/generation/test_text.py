"""Text of a row: whole characters, nothing of a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.generation.text import RowText
from jaxinfer.testing import toy_tokenizer


class Letters:
    """A decoder whose ids are code points."""

    def push(self, token_ids):
        return chr(token_ids)

    def flush(self):
        return ""


def run(text, stop):
    row, pieces = RowText(Letters(), stop), []
    for letter in text:
        pieces.append(row.push(ord(letter)))
        if row.stopped_by is not None:
            break
    return row, [*pieces, row.finish()]


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_pieces_join_to_the_text_before_the_first_stop_string(text, stop):
    row, pieces = run(text, stop)
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if ends:  # generation stops at the letter that first completes a stop string
        head = text[: min(ends)]
        at = min(head.find(s) for s in stop if s in head)
        assert row.stopped_by in stop
    else:
        at = len(text)
        assert row.stopped_by is None
    assert "".join(pieces) == row.text == text[:at]


def test_a_begun_stop_string_is_held_back_until_it_is_none():
    _, pieces = run("xENy", ["END"])
    assert pieces == ["x", "", "", "ENy", ""]


def test_a_stop_string_across_tokens_is_never_shown():
    row, pieces = run("fooENDbar", ["END"])
    assert "".join(pieces) == "foo"
    assert row.stopped_by == "END"


@given(st.text("aé€😀", max_size=8), st.lists(st.text("aé€😀", min_size=1, max_size=3), max_size=2))
def test_a_stop_string_is_found_whatever_bytes_the_tokens_cut_its_characters_into(text, stop):
    row, pieces = RowText(toy_tokenizer().stream_decoder(), stop), []
    for byte in text.encode():  # a toy token is a byte
        pieces.append(row.push(byte))
        if row.stopped_by is not None:
            break
    pieces.append(row.finish())
    by_letter, _ = run(text, stop)
    assert "".join(pieces) == row.text == by_letter.text
    assert row.stopped_by == by_letter.stopped_by


@pytest.mark.parametrize("stop", [[], ["zz"]])
def test_held_text_is_given_at_the_end(stop):
    row, pieces = run("az", stop)
    assert "".join(pieces) == "az" == row.text
