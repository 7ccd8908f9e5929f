"""The input as lines and windows, and which ids have been used."""

import pytest

from jaxinfer.batch import lines
from jaxinfer.batch.lines import read_lines, scan_input, windows
from jaxinfer.batch.seen_ids import SeenIds


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", []), (b"\n", [b""]), (b"a\n\nb", [b"a", b"", b"b"]), (b"a\r\nb\n", [b"a\r", b"b"])],
)
def test_lines_are_read_and_counted_alike(tmp_path, content, expected):
    path = tmp_path / "in"
    path.write_bytes(content)
    assert list(read_lines(path)) == expected
    assert scan_input(path).num_rows == len(expected)


def test_an_endless_line_is_not_kept_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(lines, "_READ_BYTES", 7)
    path = tmp_path / "in"
    path.write_bytes(b"x" * 100 + b"\nshort\n" + b"y" * 10 + b"\n" + b"z" * 12)
    assert list(read_lines(path)) == [b"x" * 11, b"short", b"y" * 10, b"z" * 11]


def test_windows_hold_so_many_rows_or_so_many_bytes(monkeypatch):
    monkeypatch.setattr(lines, "_WINDOW_BYTES", 10)
    found = list(windows([b"a", b"b", b"c", b"d" * 10, b"e"], 2))
    assert found == [[(1, b"a"), (2, b"b")], [(3, b"c"), (4, b"d" * 10)], [(5, b"e")]]


def test_a_touched_input_is_noticed(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b"a\n")
    facts = scan_input(path)
    facts.check_unchanged(path)
    path.write_bytes(b"ab\n")
    with pytest.raises(ValueError, match="has changed while the job was reading it"):
        facts.check_unchanged(path)


def test_a_folder_is_no_input(tmp_path):
    with pytest.raises(ValueError, match="is not a regular file"):
        scan_input(tmp_path)


def test_ids_are_new_once_and_line_numbers_count_as_ids():
    seen = SeenIds()
    #      given, line number 2, again, given, the string, line 3's... which was not taken, line 4's
    ids = ["a", 2, "a", 6, "2", 6, 3, 2]
    assert [seen.add(row_id, line) for line, row_id in enumerate(ids, 1)] == [
        True, True, False, True, True, False, True, False,
    ]  # fmt: skip
