"""`jaxinfer chat` on a tiny model, its input piped; and one process that is interrupted."""

import io
import json
import shutil
import signal

import pytest

from jaxinfer import ChatSession, load
from jaxinfer.cli import main
from tests.cli.tiny_directory import start, write_model

CAPACITY = 48  # one for all: another one compiles everything again
FIT = ("--capacity", str(CAPACITY))
FEW = (*FIT, "--max-new-tokens", "6")
ALTERNATING = """\
{%- for message in messages -%}
{%- if message['role'] not in ('user', 'assistant') -%}{{- raise_exception('unknown role') -}}{%- endif -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate') -}}
{%- endif -%}
{{ message['role'][0] }}:{{ message['content'] }}|
{%- endfor -%}a:"""


@pytest.fixture
def chat(capsys, monkeypatch, chat_model):
    """Runs the command with lines on its input; returns (exit code, stdout, stderr)."""

    def run(*lines: str, options: tuple[str, ...] = FEW, model=chat_model):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
        code = main(["chat", "--model", str(model), *options])
        written = capsys.readouterr()
        return code, written.out, written.err

    return run


@pytest.fixture
def chat_json(chat):
    """The same with --json; returns (exit code, the objects)."""

    def run(*lines: str, options: tuple[str, ...] = FEW, **where):
        code, out, _ = chat(*lines, options=(*options, "--json"), **where)
        return code, [json.loads(line) for line in out.splitlines()]

    return run


@pytest.fixture(scope="module")
def expected(chat_model):
    """What the library answers to two questions, and then to another second one."""
    session = ChatSession(load(chat_model), capacity=CAPACITY)
    replies = [session.send(text, max_new_tokens=6) for text in ("hello", "why")]
    return [*replies, session.edit(1, "how", max_new_tokens=6)]


def test_answers_are_the_librarys_and_alone_on_stdout(chat, expected):
    code, out, err = chat("hello", "", "why")
    assert code == 0
    assert out == f"{expected[0].text}\n{expected[1].text}\n"
    assert err == ""


def test_json_is_one_object_a_turn_that_says_what_was_reused(chat_json, expected):
    code, (first, second) = chat_json("hello", "why")
    assert code == 0
    assert [first["text"], second["text"]] == [expected[0].text, expected[1].text]
    assert [first["turn"], second["turn"]] == [1, 2]
    assert first["plan"]["mode"] == "full_refill"
    assert first["plan"]["reason"] == "the slot holds nothing"
    assert second["plan"]["mode"] == "exact_append"
    assert second["plan"]["reused_tokens"] == first["num_prompt_tokens"] + first["num_new_tokens"]
    assert second["plan"]["reused_tokens"] + second["plan"]["prefilled_tokens"] == second["num_prompt_tokens"]
    assert second["token_ids"] == list(expected[1].generation.token_ids)
    assert second["timings"]["first_token_ms"] > 0


def test_an_edit_asks_again_from_there_and_undo_drops_the_last_turn(chat_json, expected):
    code, records = chat_json("hello", "why", "/edit 2 how", "/undo", "/undo", "hello", "/retry")
    assert code == 0
    _, _, edited, undone, again, hello, retried = records
    assert edited["text"] == expected[2].text
    assert (edited["turn"], edited["question"]) == (2, "how")
    assert edited["plan"]["mode"] == "truncate_append"
    assert undone == {"command": "undo", "dropped": "how", "num_turns": 1}
    assert again["num_turns"] == 0
    assert hello["text"] == retried["text"] == expected[0].text
    assert hello["turn"] == retried["turn"] == 1


def test_stats_tell_the_mode_the_reason_and_the_time(chat, chat_json):
    _, _, err = chat("hello", "why", "/stats", options=(*FEW, "--stats"))
    lines = err.splitlines()
    assert lines[1].startswith("jaxinfer: exact_append: keeps ")
    assert "the prompt extends the represented tokens · first token after " in lines[1]
    assert [line.split(":")[1] for line in lines[2:4]] == [" 1", " 2"]
    assert lines[4].startswith("jaxinfer: 2 turns · the state holds ")
    _, (_, stats) = chat_json("hello", "/stats")
    assert stats["turns"][0]["plan"]["mode"] == "full_refill"
    assert stats["held_tokens"] == len("u:hello|a:") + 6
    assert stats["state_bytes"] > 0


def test_each_turn_draws_with_a_seed_of_its_own_that_gives_the_answer_again(chat_json):
    options = (*FEW, "--temperature", "1.5", "--seed", "7")
    _, first = chat_json("hello", "/retry", options=options)
    _, again = chat_json("hello", "/retry", options=options)
    assert [record["seed"] for record in first] == [7, 8]
    assert [record["text"] for record in first] == [record["text"] for record in again]
    assert first[0]["token_ids"] != first[1]["token_ids"]


def test_a_saved_conversation_goes_on_in_another_process_by_an_exact_append(chat, chat_json, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    path = str(tmp_path / "kept")
    _, (_, saved, why) = chat_json("hello", f"/save {path}", "why")
    assert saved == {"command": "save", "path": path, "num_turns": 1}
    for lines, options in (((f"/load {path}", "why"), FEW), (("why",), (*FEW, "--load", path))):
        code, records = chat_json(*lines, options=options)
        assert code == 0
        assert records[-1]["text"] == why["text"]
        assert records[-1]["plan"] == why["plan"]
    assert chat("why", options=(*FEW, "--load", path, "--system", "x"))[0] == 2


def test_a_mismatch_names_the_field_and_messages_alone_can_be_loaded(chat, chat_json, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    path = str(tmp_path / "kept")
    chat("hello", f"/save {path}")
    other = (*FEW, "--dtype", "bfloat16")
    code, (error, loaded, stats) = chat_json(
        f"/load {path}", f"/load-messages {path}", "/stats", options=other
    )
    assert code == 1
    assert 'dtype was "float32", is "bfloat16"' in error["error"]
    assert f"/load-messages {path}" in error["error"]
    assert loaded["num_turns"] == 1
    assert (stats["turns"], stats["held_tokens"]) == ([None], 0)
    assert chat(options=(*other, "--load", path))[0] == 2
    code, _, err = chat(options=(*FEW, "--load", str(tmp_path / "nowhere")))
    assert code == 1
    assert err.endswith("no conversation was saved here, or not to its end\n")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("/undo", "there is no turn -1: the conversation has 0"),
        ("/undo 2", "/undo takes nothing after it"),
        ("/edit 1 x", "there is no question 1: the conversation has 0"),
        ("/edit x", "write /edit N TEXT"),
        ("/retry", "there is nothing to retry"),
        ("/save", "write /save PATH"),
        ("/load nowhere", "nowhere: no conversation was saved here"),
        ("/nothing", "there is no command /nothing; /help shows those there are"),
    ],
)
def test_a_command_that_cannot_be_done_is_one_line_and_the_conversation_goes_on(chat, line, reason):
    code, out, err = chat(line, "/help")
    assert code == 1
    assert out == ""
    error, *help_lines = err.splitlines()
    assert error.startswith("jaxinfer: error: ")
    assert reason in error
    assert "jaxinfer: /undo drops the last question and its answer" in help_lines


def test_messages_that_the_template_refuses_are_one_line_and_change_nothing(chat, chat_model, tmp_path):
    model = shutil.copytree(chat_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(ALTERNATING)
    messages = tmp_path / "messages.json"
    for role, reason in (("user", "roles must alternate"), ("oracle", "unknown role")):
        messages.write_text(json.dumps([{"role": role, "content": "hi"}]))
        options = (*FEW, "--messages", str(messages))
        code, out, err = chat("hello", "/stats", model=model, options=options)
        assert (code, out) == (1, "")
        error, stats = err.splitlines()
        assert error == f"jaxinfer: error: the chat template refuses these messages: {reason}"
        assert stats.startswith("jaxinfer: 0 turns · the state holds 0 of ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "is not JSON text"), ('{"role": "user"}', "must hold a list"), ("[1]", "must hold a list")],
)
def test_messages_of_another_form_are_bad_use(chat, tmp_path, text, reason):
    (tmp_path / "messages.json").write_text(text)
    code, _, err = chat(options=("--messages", str(tmp_path / "messages.json")))
    assert code == 2
    assert reason in err


def test_a_full_conversation_says_what_to_do_and_can_be_undone(chat_json):
    code, records = chat_json("hello", "a question that leaves no room", "/undo", "why")
    assert code == 1
    full = records[1]["error"]
    assert "its capacity is 48: a lower --max-new-tokens leaves room, /undo takes turns back" in full
    assert "--capacity N (at most 512) starts with more" in full
    assert records[2]["num_turns"] == 0
    assert records[3]["turn"] == 1


def test_an_answer_that_the_capacity_cuts_is_told(chat):
    code, out, err = chat("hello", options=FIT)
    assert code == 0
    assert len(out.encode()) > 1
    assert "the answer was cut: the capacity of 48 tokens is reached; /undo" in err


def test_a_base_model_and_bad_input_are_bad_use(chat, base_model, monkeypatch, capsys, chat_model):
    assert chat("hello", model=base_model)[0] == 2
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert main(["chat", "--model", str(chat_model)]) == 2
    assert "line 1 of standard input is not UTF-8 text" in capsys.readouterr().err


def test_an_interrupt_ends_the_turn_alone_and_at_the_prompt_the_command(tmp_path):
    model = write_model(tmp_path, chat=True, max_position_embeddings=1 << 16, eos_token_id=None)
    options = ("--model", str(model), "--capacity", "8192", "--max-new-tokens", "8000", "--stats")
    with start("chat", *options, cache=tmp_path / "cache", stdin=True) as process:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert len(process.stdout.read(20)) == 20
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith(b"jaxinfer: interrupted after ")
        process.stdin.write(b"/stats\nhello\n")
        process.stdin.flush()
        assert process.stderr.readline().startswith(b"jaxinfer: 0 turns \xc2\xb7 the state holds 0 of 8192")
        process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith(b"jaxinfer: interrupted after ")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == b""
