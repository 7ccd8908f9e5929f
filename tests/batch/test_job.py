"""Jobs in this process: one record a row in order, whatever goes wrong, and on as if nothing had."""

import dataclasses
import errno
import json
import os

import numpy as np
import pytest

import jaxinfer.batch.job as job_module
from jaxinfer import Sampling, generate
from jaxinfer.batch import BatchFileError, Defaults, JobSettings, ResumeError, journal_path, run_job
from jaxinfer.batch import plan as plan_module
from jaxinfer.generation import traces
from jaxinfer.testing import tiny_model

MODEL = tiny_model()
SETTINGS = JobSettings(Defaults(4, Sampling(temperature=1.5)), batch_size=4)
NUM_ROWS = 22


@pytest.fixture(autouse=True)
def two_batches_a_window(monkeypatch):
    monkeypatch.setattr(plan_module, "_BATCHES_A_WINDOW", 2)


def write(path, rows):
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def job(tmp_path):
    """A job of three windows with bad rows in each; gives a function that runs it, to "out" by default."""
    rows = [{"id": f"r{index}", "prompt": "abc" * (1 + 5 * index % 11)} for index in range(NUM_ROWS)]
    rows[1], rows[9], rows[20] = b"{", {"prompt": "x" * 600}, {"id": "r0", "prompt": "again"}
    path = write(tmp_path / "in.jsonl", rows)

    def run(name="out", *, model=MODEL, settings=SETTINGS, **options):
        return run_job(model, path, tmp_path / name, settings, **options)

    return run


@pytest.fixture
def undisturbed(job, tmp_path):
    done = job("undisturbed")
    assert (done.num_rows, done.rows_done, done.errors) == (NUM_ROWS, NUM_ROWS, 3)
    return (tmp_path / "undisturbed").read_bytes()


class Killed(BaseException):
    pass


def killed_at(moment):
    """A watcher that ends the job at its `moment`-th call."""
    calls = iter(range(moment, -1, -1))

    def watch(progress):
        if next(calls) == 0:
            raise Killed

    return watch


def test_good_overlong_good_gives_three_records_in_order_the_middle_one_an_error(tmp_path):
    path = write(tmp_path / "in", [{"prompt": "a"}, {"prompt": "b" * 9999}, {"id": "c", "prompt": "c"}])
    run_job(MODEL, path, tmp_path / "out", SETTINGS)
    first, second, third = records(tmp_path / "out")
    assert [first["id"], second["id"], third["id"]] == [1, 2, "c"]
    assert second == {
        "id": 2,
        "line": 2,
        "error": "the prompt has 9999 tokens, and max_new_tokens=4 more exceed the model's 512 positions",
    }
    assert first["num_new_tokens"] == third["num_new_tokens"] == 4


def test_a_record_is_what_generate_gives(tmp_path):
    rows = [
        {"prompt": "abc", "max_new_tokens": 3, "temperature": 0, "logprobs": 1},
        {"messages": [{"role": "user", "content": "hi"}], "seed": 7},
        {"prompt": "a longer one", "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.5, "seed": 8},
    ]
    run_job(MODEL, write(tmp_path / "in", rows), tmp_path / "out", SETTINGS)
    samplings = [Sampling(), Sampling(1.5, seed=7), Sampling(0.7, top_k=5, repetition_penalty=1.5, seed=8)]
    chat = MODEL.tokenizer.encode_rendered(MODEL.chat_template.render(rows[1]["messages"]))
    prompts = [MODEL.tokenizer.encode("abc"), chat, MODEL.tokenizer.encode("a longer one")]
    expected = generate(MODEL, prompts, max_new_tokens=4, sampling=samplings)
    for record, alone, count in zip(records(tmp_path / "out"), expected, (3, 4, 4), strict=True):
        assert record["token_ids"] == list(alone.token_ids[:count])
        assert record["text"] == MODEL.tokenizer.decode(alone.token_ids[:count])
        assert record["finish_reason"] == "length"
        assert record["num_prompt_tokens"] == len(alone.prompt_token_ids)
        assert [len(entry["top"]) for entry in record.get("logprobs", [])] == [1] * 3 * (count == 3)
    assert [record["seed"] for record in records(tmp_path / "out")] == [None, 7, 8]


def test_a_hybrids_rows_are_what_each_gives_alone_also_after_a_kill(tmp_path):
    hybrid, settings = tiny_model("qwen3_5", seed=5), dataclasses.replace(SETTINGS, batch_size=2)
    rows = [{"prompt": "abc" * length, "seed": length} for length in (1, 3, 2, 4, 1)]
    path, out = write(tmp_path / "in", rows), tmp_path / "out"
    with pytest.raises(Killed):
        run_job(hybrid, path, out, settings, watch=killed_at(5))
    done = run_job(hybrid, path, out, settings, existing="resume")
    assert 0 < done.earlier_rows < len(rows)
    samplings = [Sampling(temperature=1.5, seed=row["seed"]) for row in rows]
    for record, row, sampling in zip(records(out), rows, samplings, strict=True):
        (alone,) = generate(hybrid, row["prompt"], max_new_tokens=4, sampling=sampling)
        assert record["token_ids"] == list(alone.token_ids)


def test_a_rows_draws_depend_on_its_id_alone(tmp_path):
    rows = [{"id": name, "prompt": "same"} for name in "abcd"]
    run_job(MODEL, write(tmp_path / "in", rows), tmp_path / "out", SETTINGS)
    run_job(MODEL, write(tmp_path / "in2", [rows[3], *rows[:2]]), tmp_path / "out2", SETTINGS)
    texts = {record["id"]: record["text"] for record in records(tmp_path / "out")}
    assert len(set(texts.values())) > 1
    for record in records(tmp_path / "out2"):
        assert record["text"] == texts[record["id"]]


def test_a_row_without_numbers_and_messages_without_a_template_are_errors_of_their_own(tmp_path):
    broken = MODEL.params.replace(final_norm=MODEL.params.final_norm * np.nan)
    model = dataclasses.replace(MODEL, params=broken, chat_template=None)
    rows = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "hi"}]}]
    done = run_job(model, write(tmp_path / "in", rows), tmp_path / "out", SETTINGS)
    assert done.errors == 2
    assert [record["error"] for record in records(tmp_path / "out")] == [
        "the logits after 0 new tokens are not numbers",
        "this model has no chat template; give a prompt instead of messages",
    ]


def test_an_empty_input_is_a_finished_job(tmp_path):
    (tmp_path / "in").write_bytes(b"")
    assert run_job(MODEL, tmp_path / "in", tmp_path / "out", SETTINGS).rows_done == 0
    assert (tmp_path / "out").read_bytes() == b""


def test_later_batches_compile_nothing(tmp_path):
    counts = []
    path = write(tmp_path / "in", [{"prompt": "abc"}] * 15)
    run_job(MODEL, path, tmp_path / "out", SETTINGS, watch=lambda progress: counts.append(traces()))
    assert counts[4] == counts[-1]  # after the first batch and after the last


def test_records_are_in_the_order_of_the_input(job, tmp_path):
    job()
    assert [record["line"] for record in records(tmp_path / "out")] == list(range(1, NUM_ROWS + 1))


def test_a_job_ended_at_any_moment_goes_on_to_the_same_bytes(job, undisturbed, tmp_path):
    out = tmp_path / "out"
    moments = 0
    while True:
        try:
            job(existing="resume", watch=killed_at(2 + moments % 5))
            break
        except Killed:
            moments += 1
            assert moments < 60
            assert undisturbed.startswith(out.read_bytes())
    assert moments >= 5
    assert out.read_bytes() == undisturbed


def test_a_torn_journal_and_a_torn_output_are_mended(job, undisturbed, tmp_path):
    out, journal = tmp_path / "out", journal_path(tmp_path / "out")
    with pytest.raises(Killed):
        job(watch=killed_at(12))
    whole = journal.read_bytes()
    assert whole.count(b"\n") > 1  # a head and a batch
    journal.write_bytes(whole[:-20])
    with out.open("ab") as file:
        file.write(b'{"id": "r9", "li')
    done = job(existing="resume")
    assert 0 < done.earlier_rows < NUM_ROWS
    assert out.read_bytes() == undisturbed


def test_a_kill_between_output_and_journal_doubles_nothing(job, undisturbed, tmp_path, monkeypatch):
    settle, calls = job_module.Journal.settle, []

    def killed(self, settled):
        calls.append(settled)
        if len(calls) == 3:
            raise Killed
        settle(self, settled)

    monkeypatch.setattr(job_module.Journal, "settle", killed)
    with pytest.raises(Killed):
        job()
    monkeypatch.undo()
    monkeypatch.setattr(plan_module, "_BATCHES_A_WINDOW", 2)
    job(existing="resume")
    assert (tmp_path / "out").read_bytes() == undisturbed


def test_a_finished_job_resumes_to_nothing_to_do(job, undisturbed):
    done = job("undisturbed", existing="resume", watch=None)
    assert done.earlier_rows == done.rows_done == NUM_ROWS


@pytest.mark.parametrize("room", [40, 900, 2500, 4000])
def test_a_full_disk_is_one_line_and_resuming_goes_on(job, undisturbed, tmp_path, monkeypatch, room):
    left = room
    real = os.write

    def write_some(handle, data):
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(handle, data[:left])
        left -= written
        return written

    monkeypatch.setattr("jaxinfer.batch.durable.os.write", write_some)
    with pytest.raises(BatchFileError, match=r"out(\.journal)?: No space left on device$"):
        job()
    monkeypatch.setattr("jaxinfer.batch.durable.os.write", real)
    job(existing="resume")
    assert (tmp_path / "out").read_bytes() == undisturbed
    assert not list(tmp_path.glob("*.tmp"))


def test_an_output_that_is_there_is_refused_or_overwritten(job, undisturbed, tmp_path):
    for _ in range(2):
        with pytest.raises(ValueError, match="go on with --resume, or start anew with --overwrite"):
            job("undisturbed")
        assert (tmp_path / "undisturbed").read_bytes() == undisturbed
    (tmp_path / "other").write_text("mine\n")
    with pytest.raises(ResumeError, match=r"other has no other.journal beside it"):
        job("other", existing="resume")
    assert (tmp_path / "other").read_text() == "mine\n"
    job("other", existing="overwrite")
    assert (tmp_path / "other").read_bytes() == undisturbed


def test_another_input_other_options_or_another_model_are_not_resumed(job, tmp_path):
    with pytest.raises(Killed):
        job(watch=killed_at(9))
    kept = (tmp_path / "out").read_bytes()
    hotter = dataclasses.replace(SETTINGS, defaults=Defaults(4, Sampling(temperature=1.6)))
    narrower = dataclasses.replace(SETTINGS, batch_size=2)
    other = dataclasses.replace(MODEL, fingerprint="other")
    for changed, difference in (
        ({"settings": hotter}, r"--temperature was 1\.5 and is 1\.6"),
        ({"settings": narrower}, "--batch-size was 4 and is 2"),
        (
            {"model": other},
            "the model is not the same: its weights",
        ),
    ):
        with pytest.raises(ResumeError, match=rf"out\.journal is of another job: {difference}"):
            job(existing="resume", **changed)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(ResumeError, match="the input file is not the same"):
        job(existing="resume")
    assert (tmp_path / "out").read_bytes() == kept


def test_an_output_that_was_edited_is_not_resumed(job, tmp_path):
    with pytest.raises(Killed):
        job(watch=killed_at(9))
    out = tmp_path / "out"
    assert out.stat().st_size > 0
    for changed in (out.read_bytes()[:-1], out.read_bytes().replace(b"r0", b"r1", 1)):
        out.write_bytes(changed)
        with pytest.raises(ResumeError, match="the output is not what the job has written"):
            job(existing="resume")
        assert out.read_bytes() == changed


def test_two_jobs_do_not_write_one_output(job):
    def meanwhile(progress):
        with pytest.raises(BatchFileError, match="another process is writing it"):
            job(existing="resume")
        raise Killed

    with pytest.raises(Killed):
        job(watch=meanwhile)


def test_paths_that_do_not_fit_are_refused_before_anything_is_touched(job, tmp_path):
    with pytest.raises(ValueError, match=r"in\.jsonl is the input"):
        job("in.jsonl", existing="overwrite")
    with pytest.raises(BatchFileError, match="there is no such folder"):
        job("nowhere/out")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BatchFileError, match="folder is not a regular file"):
        job("folder", existing="overwrite")
