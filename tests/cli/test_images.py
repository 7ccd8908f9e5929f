"""Images on the command line, with a model that reads them: `generate --image`, and `/image` in a chat."""

import io
import json

import numpy as np
import PIL.Image
import pytest
import tokenizers

import jaxinfer as ji
from jaxinfer.cli import main
from tests.cli.tiny_directory import write_model

TEMPLATE = """\
{%- for message in messages -%}
{{ message['role'][0] }}:
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{{ '<start_of_image>' if part['type'] == 'image' else part['text'] }}
{%- endfor -%}
{%- endif -%}|
{%- endfor -%}a:"""


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A Gemma 3 with an image tower; its image tokens are 297 to 299."""
    directory = write_model(tmp_path_factory.mktemp("reader"), chat=True, family="gemma3")
    path = directory / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    names = [f"<unused{index}>" for index in range(backend.get_vocab_size(), 297)]
    backend.add_special_tokens([*names, "<start_of_image>", "<end_of_image>", "<image_soft_token>"])
    backend.save(str(path))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture
def photo(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8)
    PIL.Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    return code, capsys.readouterr()


def test_generate_reads_the_image_that_it_is_given(reader, photo, capsys):
    options = ("generate", "What is this?", "--model", reader, "--max-new-tokens", 4, "--json")
    code, printed = run(capsys, *options, "--image", photo)
    assert code == 0, printed.err
    answer = json.loads(printed.out)
    model = ji.load(reader)
    session = ji.ChatSession(model, capacity=256)
    reply = session.send("What is this?", images=[PIL.Image.open(photo)], max_new_tokens=4)
    assert answer["token_ids"] == list(reply.generation.token_ids)
    code, printed = run(capsys, *options)
    assert json.loads(printed.out)["token_ids"] != answer["token_ids"]


def test_a_bad_image_is_one_line(reader, tmp_path, capsys):
    (tmp_path / "bad.png").write_bytes(b"no image")
    code, printed = run(capsys, "generate", "What?", "--model", reader, "--image", tmp_path / "bad.png")
    assert code != 0
    assert "bad.png" in printed.err
    assert len(printed.err.strip().splitlines()) == 1


def test_a_chat_takes_an_image_for_its_next_question(reader, photo, capsys, monkeypatch):
    lines = f"/image {photo}\nWhat is this?\nAnd now?\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    code, printed = run(capsys, "chat", "--model", reader, "--max-new-tokens", 4, "--capacity", 256, "--json")
    assert code == 0, printed.err
    turns = [json.loads(line) for line in printed.out.splitlines()]
    session = ji.ChatSession(ji.load(reader), capacity=256)
    expected = [session.send("What is this?", images=[str(photo)], max_new_tokens=4)]
    expected.append(session.send("And now?", max_new_tokens=4))
    assert [turn["text"] for turn in turns if "text" in turn] == [reply.text for reply in expected]
