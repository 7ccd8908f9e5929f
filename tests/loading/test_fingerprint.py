import hashlib
import os

import pytest

from jaxinfer.loading import fingerprint
from jaxinfer.loading.fingerprint import content_fingerprint, file_digest


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"abc" * 1000)
    return path


def test_the_digest_is_sha256_of_the_content(file):
    assert file_digest(file) == hashlib.sha256(b"abc" * 1000).hexdigest()


def test_a_digest_is_taken_once(file, monkeypatch):
    first = file_digest(file)
    monkeypatch.setattr(fingerprint.hashlib, "sha256", None)
    assert file_digest(file) == first


@pytest.mark.parametrize("content", [b"xyz" * 1000, b"abc" * 999])
def test_a_changed_file_has_another_digest(file, content):
    first = file_digest(file)
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    assert file_digest(file) == hashlib.sha256(content).hexdigest() != first


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b'{"sha256": "short"}', b"\xff"])
def test_a_damaged_note_is_not_believed(file, note):
    first = file_digest(file)
    file.with_name(".weights.bin.sha256").write_bytes(note)
    assert file_digest(file) == first


def test_a_folder_that_cannot_be_written_is_no_hindrance(file, monkeypatch):
    def deny(path, data):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fingerprint, "write_atomically", deny)
    assert file_digest(file) == hashlib.sha256(b"abc" * 1000).hexdigest()
    assert [path.name for path in file.parent.iterdir()] == ["weights.bin"]


def test_content_counts_and_names_do_not(tmp_path):
    for name, content in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        (tmp_path / name).write_bytes(content)
    a, b, c = (tmp_path / name for name in "abc")
    assert content_fingerprint([a, b]) == content_fingerprint([c, b])
    assert len({content_fingerprint(paths) for paths in ([a], [b], [a, b], [b, a], [])}) == 5
