import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jaxinfer.loading.directory_tokenizer import directory_chat_template, directory_tokenizer
from jaxinfer.loading.tensor_source import CheckpointError
from jaxinfer.loading.tokenizer import BYTE_OF_CHARACTER

BOS, EOS, TURN = 256, 257, 258
SETTINGS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}


def byte_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_OF_CHARACTER), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<turn>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return backend


def write(directory, backend=None, settings=None, generation=None) -> None:
    (backend or byte_backend()).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(SETTINGS if settings is None else settings))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))


def test_raw_text_is_framed_as_the_tokenizer_says_and_rendered_text_is_not(tmp_path):
    write(tmp_path)
    tokenizer = directory_tokenizer(tmp_path, {})
    assert tokenizer.encode("hi") == [BOS, *b"hi"]
    assert tokenizer.encode_rendered("<s>hi</s>") == [BOS, *b"hi", EOS]
    assert tokenizer.bos_token_id == BOS
    assert tokenizer.vocab_size == 259


@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        ({"add_bos_token": False}, [*b"hi"]),
        ({"add_bos_token": True}, [BOS, *b"hi"]),
        ({"add_eos_token": True}, [*b"hi", EOS]),
        ({"add_bos_token": True, "add_eos_token": True}, [BOS, *b"hi", EOS]),
    ],
)
def test_explicit_framing_flags_decide(tmp_path, flags, ids):
    write(tmp_path, settings=SETTINGS | flags)
    assert directory_tokenizer(tmp_path, {}).encode("hi") == ids


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({}, None, (EOS,)),
        ({}, {"eos_token_id": [EOS, TURN]}, (EOS, TURN)),
        ({"eos_token_id": TURN}, {"eos_token_id": None}, (EOS, TURN)),
        ({"text_config": {"eos_token_id": [5]}}, {"eos_token_id": TURN}, (5, EOS, TURN)),
    ],
)
def test_ends_are_the_union_of_what_every_file_says(tmp_path, config, generation, ends):
    write(tmp_path, generation=generation)
    assert directory_tokenizer(tmp_path, config).eos_token_ids == ends


def test_a_stored_length_limit_does_not_cut_texts(tmp_path):
    backend = byte_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    write(tmp_path, backend)
    assert directory_tokenizer(tmp_path, {}).encode("hello there") == [BOS, *b"hello there"]


def test_sentencepiece_decoders_with_and_without_a_prefix_are_known(tmp_path):
    vocab = {
        piece: index
        for index, piece in enumerate(["<unk>", "\u2581", "a", "b", "<0xC3>", "<0xA9>", "\u2581a"])
    }
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    write(tmp_path, backend, settings={})
    tokenizer = directory_tokenizer(tmp_path, {})
    ids = tokenizer.encode("a bé a")
    assert ids == [6, 1, 3, 4, 5, 6]
    assert tokenizer.decode(ids) == "a bé a" == backend.decode(ids)
    backend.decoder = decoders.Sequence(steps)
    write(tmp_path, backend, settings={})
    assert directory_tokenizer(tmp_path, {}).decode(ids) == " a bé a" == backend.decode(ids)
    backend.decoder = decoders.Metaspace()
    write(tmp_path, backend, settings={})
    assert directory_tokenizer(tmp_path, {}).decode(ids[:1]) == "a"


def test_another_decoder_is_refused(tmp_path):
    backend = byte_backend()
    backend.decoder = decoders.WordPiece()
    write(tmp_path, backend)
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json: a decoder of \['WordPiece'\] is not supported"
    ):
        directory_tokenizer(tmp_path, {})


def test_tokens_that_only_the_settings_list_get_their_ids(tmp_path):
    listed = {"259": {"content": "<new>", "special": True}, "256": {"content": "<s>", "special": True}}
    write(tmp_path, settings=SETTINGS | {"added_tokens_decoder": listed})
    tokenizer = directory_tokenizer(tmp_path, {})
    assert tokenizer.encode_rendered("a<new>") == [ord("a"), 259]
    assert 259 in tokenizer.special_ids


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"added_tokens_decoder": {"300": {"content": "<new>"}}}, "token '<new>' has id 259, but"),
        ({"added_tokens_decoder": {"x": {"content": "<new>"}}}, "'added_tokens_decoder' .* is damaged"),
        ({"added_tokens_decoder": [1]}, "'added_tokens_decoder' .* is damaged"),
        ({"bos_token": "<nowhere>"}, "has no token '<nowhere>', which is the bos_token"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, settings, problem):
    write(tmp_path, settings=SETTINGS | settings)
    with pytest.raises(CheckpointError, match=problem):
        directory_tokenizer(tmp_path, {})


def test_an_end_outside_the_vocabulary_is_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(CheckpointError, match="BOS or EOS id 9999 is outside its vocabulary of 259"):
        directory_tokenizer(tmp_path, {"eos_token_id": [EOS, 9999]})


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {}}'])
def test_a_damaged_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read: "):
        directory_tokenizer(tmp_path, {})


def test_a_fault_that_shows_only_in_use_is_found_on_reading(tmp_path):
    stored = json.loads(byte_backend().to_str())
    stored["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read: "):
        directory_tokenizer(tmp_path, {})


def test_a_damaged_config_is_named(tmp_path):
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text("{'eos_token_id': 1}")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: is not JSON"):
        directory_tokenizer(tmp_path, {})


def test_no_tokenizer_is_none_and_a_sentencepiece_model_alone_is_an_error(tmp_path):
    assert directory_tokenizer(tmp_path, {}) is None
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"has tokenizer\.model but no tokenizer\.json"):
        directory_tokenizer(tmp_path, {})


def test_the_fingerprint_follows_the_files(tmp_path):
    write(tmp_path)
    first = directory_tokenizer(tmp_path, {}).fingerprint
    assert directory_tokenizer(tmp_path, {}).fingerprint == first
    assert directory_tokenizer(tmp_path, {"eos_token_id": TURN}).fingerprint != first
    backend = byte_backend()
    backend.add_tokens(["<more>"])
    write(tmp_path, backend)
    assert directory_tokenizer(tmp_path, {}).fingerprint != first


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"])
def test_a_chat_template_is_found_in_each_of_its_places(tmp_path, place):
    source = "{{ bos_token }}{{ messages[0]['content'] }}"
    write(tmp_path)
    if place.endswith(".jinja"):
        (tmp_path / place).write_text(source)
    else:
        settings = SETTINGS if place == "tokenizer_config.json" else {}
        (tmp_path / place).write_text(json.dumps(settings | {"chat_template": source}))
    template = directory_chat_template(tmp_path)
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>hi"


def test_named_chat_templates_are_told_apart(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = directory_chat_template(tmp_path)
    assert (template.render([]), template.render([], tools=[{}])) == ("d", "t")


@pytest.mark.parametrize("value", [5, ["x"], [{"name": "default"}], "{% if %}"])
def test_a_chat_template_that_is_none_is_refused(tmp_path, value):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: .*chat template"):
        directory_chat_template(tmp_path)


def test_no_chat_template_is_none(tmp_path):
    write(tmp_path)
    assert directory_chat_template(tmp_path) is None
