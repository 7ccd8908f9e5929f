"""`jaxinfer generate` on a tiny model, in this process."""

import io
import json
import math

import pytest

import jaxinfer.generation
from jaxinfer import Sampling, generate, load
from jaxinfer.cli import main
from jaxinfer.cli.generate import encode_prompt
from jaxinfer.loading import PullError

FEW = ("--max-new-tokens", "12")


def run_json(capsys, *arguments: str) -> dict:
    code = main(["generate", *arguments, "--json"])
    written = capsys.readouterr()
    assert code == 0, written.err
    assert written.out.count("\n") == 1
    return json.loads(written.out)


@pytest.fixture(scope="module")
def expected(chat_model):
    """What the library generates for the rendered prompt."""
    model = load(chat_model)
    ids = model.tokenizer.encode_rendered("u:hello|a:")
    return generate(model, [ids], max_new_tokens=12)[0]


def test_the_text_is_the_librarys_and_alone_on_stdout(chat_model, expected, capsys):
    assert main(["generate", "hello", "--model", str(chat_model), *FEW]) == 0
    written = capsys.readouterr()
    assert written.out == expected.text + "\n"
    assert written.err == ""


def test_without_streaming_the_text_is_the_same(chat_model, expected, capsys):
    assert main(["generate", "hello", "--model", str(chat_model), *FEW, "--no-stream"]) == 0
    assert capsys.readouterr().out == expected.text + "\n"


def test_json_says_what_was_generated_and_how_fast(chat_model, expected, capsys):
    record = run_json(capsys, "hello", "--model", str(chat_model), *FEW)
    assert record["model"] == str(chat_model)
    assert record["text"] == expected.text
    assert record["token_ids"] == list(expected.token_ids)
    assert record["num_prompt_tokens"] == len("u:hello|a:")
    assert record["num_new_tokens"] == 12
    assert record["finish_reason"] == "length"
    assert record["stop"] is None
    assert "logprobs" not in record
    assert record["timings"].keys() == {"load_ms", "first_token_ms", "tokens_per_s"}
    assert all(value > 0 for value in record["timings"].values())


def test_the_prompt_comes_from_stdin_less_its_last_newline(chat_model, expected, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    assert main(["generate", "-", "--model", str(chat_model), *FEW]) == 0
    assert capsys.readouterr().out == expected.text + "\n"


def test_a_stop_text_ends_the_answer_and_is_told(chat_model, expected, capsys):
    stop = expected.text[3:5]
    record = run_json(capsys, "hello", "--model", str(chat_model), *FEW, "--stop", "zzzz", "--stop", stop)
    assert record["text"] == expected.text[: expected.text.index(stop)]
    assert record["finish_reason"] == "stop"
    assert record["stop"] == stop


def test_logprobs_are_in_json_and_in_a_table(chat_model, capsys):
    options = ("hello", "--model", str(chat_model), *FEW, "--logprobs", "0")
    record = run_json(capsys, *options)
    entries = record["logprobs"]
    assert [entry["token_id"] for entry in entries] == record["token_ids"]
    assert all(entry["logprob"] < 0 and entry["top"] == [] for entry in entries)
    assert main(["generate", *options]) == 0
    table = capsys.readouterr().out.split("\n\n", 1)[1].splitlines()
    assert table[0].split() == ["TOKEN", "LOGPROB", "PROBABILITY"]
    assert len(table) == 13
    assert f"{entries[0]['logprob']:.3f}" in table[1]
    assert f"{math.exp(entries[0]['logprob']):.0%}" in table[1]


def test_a_seed_is_told_and_gives_the_answer_again(chat_model, capsys):
    options = ("hello", "--model", str(chat_model), *FEW, "--temperature", "1.5")
    first = run_json(capsys, *options)
    again = run_json(capsys, *options, "--seed", str(first["seed"]))
    other = run_json(capsys, *options, "--seed", str(first["seed"] + 1))
    assert again["token_ids"] == first["token_ids"] != other["token_ids"]


def test_a_system_message_goes_through_the_template(chat_model):
    model = load(chat_model)
    ids = encode_prompt(model, "hi", [], system="be kind", raw=False).prompt.token_ids
    assert model.tokenizer.decode(ids) == "s:be kind|u:hi|a:"


def test_raw_text_and_base_models_use_no_template(chat_model, base_model):
    for directory, raw in ((chat_model, True), (base_model, False), (base_model, True)):
        model = load(directory)
        ids = encode_prompt(model, "hi", [], system=None, raw=raw).prompt.token_ids
        assert list(ids) == model.tokenizer.encode("hi")


def test_a_model_of_text_refuses_an_image_in_one_line(chat_model, capsys):
    assert main(["generate", "hello", "--image", "a.png", "--model", str(chat_model)]) == 2
    assert "--image: this model reads text alone; it has no image tower" in capsys.readouterr().err


@pytest.fixture
def called(monkeypatch):
    """Replaces `generate`; gives a function that runs the command and returns what it passed on."""
    calls = []

    def interrupted(model, prompts, **options):
        calls.append((model, prompts, options))
        raise KeyboardInterrupt

    monkeypatch.setattr(jaxinfer.generation, "generate", interrupted)

    def run(*arguments: str):
        assert main(["generate", *arguments]) == 130
        return calls.pop()

    return run


def test_every_option_reaches_the_library(called, chat_model):
    options = ["--temperature", "0.7", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.05"]
    options += ["--repetition-penalty", "1.1", "--seed", "7", "--max-new-tokens", "5"]
    options += ["--stop", "x", "--stop", "y", "--logprobs", "3", "--dtype", "bfloat16", "--kv-window"]
    model, _, passed = called("hello", "--model", str(chat_model), *options)
    assert passed["sampling"] == Sampling(0.7, 40, 0.9, 0.05, 1.1, 7)
    assert passed["max_new_tokens"] == 5
    assert passed["stop"] == ["x", "y"]
    assert passed["logprobs"] == 3
    assert model.config.dtype == "bfloat16"
    assert model.kv_window.enabled


def test_without_options_it_is_greedy_and_the_environment_decides_on_the_window(
    called, chat_model, monkeypatch
):
    monkeypatch.setenv("JAXINFER_KV_WINDOW", "on")
    model, _, passed = called("hello", "--model", str(chat_model))
    assert passed["sampling"] == Sampling()
    assert passed["max_new_tokens"] == 256
    assert model.kv_window.enabled
    assert not called("hello", "--model", str(chat_model), "--no-kv-window")[0].kv_window.enabled


def test_without_a_number_of_tokens_the_positions_bound_the_answer(called, base_model):
    _, _, passed = called("x" * 57, "--model", str(base_model))
    assert passed["max_new_tokens"] == 7  # of 64 positions


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--top-k", "0"), "Sampling(top_k=...) must be None (off) or at least 1; got 0"),
        (("--max-new-tokens", "0"), "generate(max_new_tokens=...) must be an int of at least 1"),
        (("--max-new-tokens", "600"), "exceed the model's 512 positions"),
        (("--logprobs", "-1"), "generate(logprobs=...) must be an int of at least 0"),
        (("--stop", ""), "generate(stop=...) must be strings that are not empty"),
        (("--system", "x", "--raw"), "--system cannot be used: --raw uses no chat template"),
        (("--system", "refuse"), "no such system message"),
        (("--temperature", "warm"), "argument --temperature: invalid float value: 'warm'"),
        (("--dtype", "float16"), "argument --dtype: invalid choice: 'float16'"),
        (("--max", "3"), "unrecognized arguments: --max 3"),
    ],
)
def test_options_that_do_not_fit_are_bad_use(chat_model, capsys, options, reason):
    assert main(["generate", "hello", "--model", str(chat_model), *options]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith("jaxinfer: error: ")
    assert written.err.count("\n") == 1
    assert reason in written.err


def test_a_system_message_for_a_base_model_is_bad_use(base_model, capsys):
    assert main(["generate", "hello", "--model", str(base_model), "--system", "x"]) == 2
    assert "this model has no chat template" in capsys.readouterr().err


def test_an_empty_raw_prompt_is_bad_use(base_model, capsys):
    assert main(["generate", "", "--model", str(base_model)]) == 2
    assert "an empty prompt cannot be continued" in capsys.readouterr().err


def test_stdin_that_is_not_text_is_bad_use(chat_model, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc\xff")))
    assert main(["generate", "-", "--model", str(chat_model)]) == 2
    assert "standard input is not UTF-8 text: invalid start byte at byte 3" in capsys.readouterr().err


def test_a_name_that_is_no_model_is_bad_use(capsys):
    assert main(["generate", "hello", "--model", "no-such-model"]) == 2
    assert "model 'no-such-model' does not exist: pass a directory" in capsys.readouterr().err


def test_a_known_model_that_is_not_pulled_says_how_to_get_it(capsys):
    assert main(["generate", "hello", "--model", "gemma3-270m"]) == 1
    assert "run `jaxinfer pull gemma3-270m`" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_a_failure_that_names_the_file(chat_model, tmp_path, capsys):
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{broken}")
    (tmp_path / "config.json").write_bytes((chat_model / "config.json").read_bytes())
    assert main(["generate", "hello", "--model", str(tmp_path)]) == 1
    written = capsys.readouterr()
    assert str(tmp_path / "model.safetensors") in written.err
    assert written.err.count("\n") == 1


def test_the_default_model_is_pulled_when_it_is_missing(capsys, monkeypatch):
    def refuse(name):
        raise PullError(f"no connection for {name}")

    monkeypatch.setattr("jaxinfer.cli.model_source.pull_with_progress", refuse)
    assert main(["generate", "hello"]) == 1
    assert capsys.readouterr().err == "jaxinfer: error: no connection for smollm2-135m\n"


def interrupted_after(count):
    """`generate`, interrupted in the callback that gets the `count`-th piece."""

    def interrupted(model, prompts, *, stream, **options):
        seen = []

        def watched(chunk):
            stream(chunk)
            seen.append(chunk)
            if len(seen) == count:
                raise KeyboardInterrupt

        return generate(model, prompts, stream=watched, **options)

    return interrupted


@pytest.mark.parametrize("mode", ["--no-stream", "--json", "--raw"])
def test_what_came_before_an_interrupt_stays(chat_model, capsys, monkeypatch, mode):
    options = ("hello", "--model", str(chat_model), *FEW, mode)
    main(["generate", *options])
    whole = capsys.readouterr().out
    monkeypatch.setattr(jaxinfer.generation, "generate", interrupted_after(2))
    assert main(["generate", *options]) == 130
    written = capsys.readouterr()
    assert written.err == "jaxinfer: interrupted after 3 tokens\n"
    if mode == "--json":
        record = json.loads(written.out)
        assert record["finish_reason"] == "interrupted"
        assert record["token_ids"] == json.loads(whole)["token_ids"][:3]
        assert json.loads(whole)["text"].startswith(record["text"])
    else:
        assert written.out.endswith("\n")
        assert whole.startswith(written.out.removesuffix("\n"))
        assert len(written.out) > 1


def test_an_unexpected_error_is_one_line_and_its_origin_is_shown_on_request(chat_model, capsys, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(jaxinfer.generation, "generate", fail)
    options = ["generate", "hello", "--model", str(chat_model)]
    assert main(options) == 1
    assert capsys.readouterr().err == "jaxinfer: error: RuntimeError: first line second line\n"
    assert main([*options, "--traceback"]) == 1
    assert "in fail" in capsys.readouterr().err
