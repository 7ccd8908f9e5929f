"""`jaxinfer batch` on a tiny model, in this process."""

import json

import pytest

import jaxinfer.batch
from jaxinfer.batch import Defaults, JobSettings, Progress
from jaxinfer.cli import main
from jaxinfer.cli.batch import _duration
from jaxinfer.sampling import Sampling

FEW = ("--max-new-tokens", "3", "--batch-size", "2")


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(
        '{"id": "a", "messages": [{"role": "user", "content": "hi"}]}\nnot json\n{"prompt": "x"}\n'
    )
    return str(path)


def test_records_are_written_and_json_sums_up(rows, chat_model, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert main(["batch", rows, str(out), "--model", str(chat_model), *FEW, "--json"]) == 0
    written = capsys.readouterr()
    summary = json.loads(written.out)
    assert (summary["num_rows"], summary["num_errors"], summary["num_new_tokens"]) == (3, 1, 6)
    assert summary["timings"]["tokens_per_s"] > 0
    assert written.err == ""
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["a", 2, 3]
    command = ["batch", rows, str(out), "--model", str(chat_model), *FEW]
    assert main([*command, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_resumed_rows"] == 3
    assert main([*command, "--overwrite"]) == 0
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err == f"jaxinfer: {out}: 1 of 3 rows are error records\n"


def test_what_is_wrong_is_one_line_before_a_model_is_loaded(rows, tmp_path, capsys):
    there = tmp_path / "there"
    there.write_text("mine\n")
    for code, line, arguments in (
        (2, "go on with --resume, or start anew with --overwrite", (rows, str(there))),
        (2, "beside it to resume from", (rows, str(there), "--resume")),
        (2, "is the input", (rows, rows, "--overwrite")),
        (2, "not allowed with argument", (rows, str(there), "--resume", "--overwrite")),
        (2, "is not a size", (rows, "out", "--memory", "much")),
        (2, "max_new_tokens must be", (rows, str(tmp_path / "out"), "--max-new-tokens", "0")),
        (1, "no such folder", (rows, str(tmp_path / "nowhere" / "out"))),
        (1, "No such file or directory", (str(tmp_path / "nowhere"), str(tmp_path / "out"))),
        (1, "is not a regular file", (rows, "/dev/full", "--overwrite")),
    ):
        assert main(["batch", *arguments, "--model", "nowhere"]) == code
        written = capsys.readouterr()
        assert line in written.err
        assert written.err.count("\n") == 1
    assert there.read_text() == "mine\n"


def test_every_option_reaches_the_job_and_an_interrupt_says_how_to_go_on(
    rows, chat_model, tmp_path, capsys, monkeypatch
):
    calls = []

    def interrupted(model, source, output, settings, *, existing, watch):
        calls.append((settings, existing))
        watch(Progress(3, 2, 1, 5, 0, 0))
        raise KeyboardInterrupt

    monkeypatch.setattr(jaxinfer.batch, "run_job", interrupted)
    options = ["--temperature", "0.7", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.05", "--seed", "7"]
    options += ["--repetition-penalty", "1.1", "--max-new-tokens", "5", "--stop", "x", "--stop", "y"]
    options += ["--logprobs", "3", "--batch-size", "6", "--memory", "2MiB", "--resume"]
    assert main(["batch", rows, str(tmp_path / "out"), "--model", str(chat_model), *options]) == 130
    defaults = Defaults(5, Sampling(0.7, 40, 0.9, 0.05, 1.1, 7), ("x", "y"), 3)
    assert calls == [(JobSettings(defaults, 6, 2 << 20), "resume")]
    assert capsys.readouterr().err == (
        "jaxinfer: interrupted: 2 of 3 rows are done; the same command with --resume goes on\n"
    )


def test_help_says_what_goes_in_and_what_comes_out(capsys):
    assert main(["batch", "--help"]) == 0
    shown = capsys.readouterr().out
    for part in ('{"id": "a", "prompt": "The sea is"}', "messages", "--resume", "OUTPUT.journal"):
        assert part in shown


def test_times_are_short():
    assert [_duration(seconds) for seconds in (0, 61.4, 3723)] == ["0:00", "1:01", "1:02:03"]
