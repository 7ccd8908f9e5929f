import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxinfer.loading.gguf_tokenizer import derived_merges, gguf_chat_template, gguf_tokenizer
from jaxinfer.loading.tensor_source import CheckpointError
from tests.loading import tiny_vocabulary
from tests.loading.tiny_vocabulary import byte_level, file_with, sentence_piece, trained

PREFIX = pytest.mark.parametrize("add_dummy_prefix", [False, True])
FRAGMENTS = (
    *("a", "b", "n", "an", "the", "ell", " ", "  ", "   ", "\n", "\n\n", "\t", "1", "23"),
    *("<td>", "<", "td>", "<0x41>", "é", "e\u0301", "ж", "слово", "文", "日本", "🙂", "\u2581", "\x00"),
)


@PREFIX
@settings(max_examples=300)
@given(text=st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join))
@example("aaaaaaaaaaaaaaaa")
@example("     the  ")
@example("\n\n\n\n\n<td>\n<td><td> <td>")
def test_ids_equal_the_sentencepiece_librarys(add_dummy_prefix, text):
    tokenizer = gguf_tokenizer_of(add_dummy_prefix)
    processor = trained(add_dummy_prefix)
    ids = processor.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.decode(ids) == processor.decode(ids)


_built = {}


def gguf_tokenizer_of(add_dummy_prefix):
    if add_dummy_prefix not in _built:
        _built[add_dummy_prefix] = gguf_tokenizer(sentence_piece(add_dummy_prefix))
    return _built[add_dummy_prefix]


@PREFIX
def test_text_between_control_tokens_is_encoded_as_a_text_of_its_own(add_dummy_prefix):
    tokenizer = gguf_tokenizer_of(add_dummy_prefix)
    processor = trained(add_dummy_prefix)
    parts = [processor.encode(text) for text in ("the fox", "a dog\n")]
    assert tokenizer.encode_rendered("<s>the fox</s><s>a dog\n") == [1, *parts[0], 2, 1, *parts[1]]


def test_merges_come_best_score_first_and_only_from_normal_pieces():
    tokens = ["<s>", "a", "b", "ab", "aba", "<0x41>", "<0x4", "1>", "ba"]
    scores = np.array([0, -5, -6, -2, -3, 0, -7, -8, -1], np.float32)
    normal = [1, 2, 3, 4, 6, 7, 8]
    assert derived_merges(tokens, scores, normal) == [("b", "a"), ("a", "b"), ("a", "ba"), ("ab", "a")]


def test_digits_stand_alone_under_the_smollm_pre_tokenizer_and_not_under_gpt2():
    smollm = gguf_tokenizer(byte_level())
    gpt2 = gguf_tokenizer(byte_level(pre="gpt-2"))
    one, two, both = (smollm.token_id(token) for token in ("1", "2", "12"))
    assert smollm.encode("12") == [one, two]
    assert gpt2.encode("12") == [both]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_digit_groups_of_other_pre_tokenizers(pre):
    tokenizer = gguf_tokenizer(byte_level(pre=pre))
    expected = ["12", "3", "4"] if pre == "llama-bpe" else ["1", "2", "3", "4"]
    assert [tokenizer.token_bytes(index).decode() for index in tokenizer.encode("1234")] == expected


def test_qwen2_composes_characters_first():
    tokenizer = gguf_tokenizer(byte_level(pre="qwen2"))
    assert tokenizer.encode("e\u0301") == [tokenizer.token_id("Ã©")]


def test_control_and_user_defined_tokens_are_found_in_text():
    tokenizer = gguf_tokenizer(byte_level())
    ids = tokenizer.encode("<|im_start|>the<think><|im_end|>")
    assert ids == [1, tokenizer.token_id("the"), tokenizer.token_id("<think>"), 2]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(ids) == "the<think>"


def test_framing_follows_the_file():
    assert gguf_tokenizer(byte_level()).encode("the")[0] != 1
    framed = gguf_tokenizer(byte_level(add_bos_token=True, add_eos_token=True)).encode("the")
    assert (framed[0], framed[-1]) == (1, 2)
    assert gguf_tokenizer(sentence_piece(False, add_bos_token=None)).encode("the")[0] == 1
    assert gguf_tokenizer(byte_level(add_bos_token=None)).encode("the")[0] != 1


def test_every_kind_of_end_counts():
    tokenizer = gguf_tokenizer(byte_level(eot_token_id=0, eom_token_id=2))
    assert tokenizer.eos_token_ids == (0, 2)


def test_the_fingerprint_follows_whatever_changes_ids_or_texts():
    base = byte_level()
    changes = (
        {"merges": base.metadata["tokenizer.ggml.merges"][:-1]},
        {"tokens": [*base.metadata["tokenizer.ggml.tokens"][:-1], "<thonk>"]},
        {"pre": "gpt-2"},
        {"add_bos_token": True},
        {"eos_token_id": 0},
    )
    prints = {gguf_tokenizer(byte_level(**change)).fingerprint for change in changes}
    same = gguf_tokenizer(byte_level()).fingerprint
    assert same == gguf_tokenizer(base).fingerprint
    assert len(prints | {same}) == len(changes) + 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "bert"}, "tokenizer model 'bert' is not supported; known: gpt2, llama"),
        ({"model": None}, "'tokenizer.ggml.model' must be a str; got nothing"),
        ({"tokens": None}, "'tokenizer.ggml.tokens' must be a list; got nothing"),
        ({"tokens": []}, "'tokenizer.ggml.tokens' must be a list"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported; known: gpt-2, llama-bpe"),
        ({"pre": None}, "pre-tokenizer None is not supported"),
        ({"merges": ["a b c"]}, "'tokenizer.ggml.merges'[0] is not a pair of tokens"),
        ({"merges": ["zz yy"]}, "its tokenizer cannot be built: "),
        ({"token_type": np.zeros(3, np.int32)}, "'tokenizer.ggml.token_type' must have one entry for each"),
        ({"eos_token_id": 9999}, "'tokenizer.ggml.eos_token_id' = 9999 is outside the vocabulary"),
        ({"add_bos_token": 1}, "'tokenizer.ggml.add_bos_token' must be true or false; got 1"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id' is missing but add_bos_token is set"),
    ],
)
def test_byte_level_metadata_that_is_wrong_is_named(changes, problem):
    with pytest.raises(CheckpointError) as caught:
        gguf_tokenizer(byte_level(**changes))
    assert str(caught.value).startswith("toy.gguf: ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"scores": None}, "'tokenizer.ggml.scores' must be"),
        ({"scores": np.zeros(4, np.float32)}, "'tokenizer.ggml.scores' must have one entry for each token"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces' = True is not supported"),
    ],
)
def test_sentencepiece_metadata_that_is_wrong_is_named(changes, problem):
    with pytest.raises(CheckpointError, match=problem):
        gguf_tokenizer(sentence_piece(False, **changes))


def test_a_token_listed_twice_is_named():
    tokens = byte_level().metadata["tokenizer.ggml.tokens"]
    with pytest.raises(CheckpointError, match=r"lists '<\|im_end\|>' twice"):
        gguf_tokenizer(byte_level(tokens=[*tokens[:-1], "<|im_end|>"]))


def test_the_chat_template_of_a_file_knows_its_special_tokens():
    source = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    metadata = {
        "ggml.tokens": ["<a>", "<b>"],
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 1,
        "chat_template": source,
    }
    template = gguf_chat_template(file_with(metadata))
    assert template.render([{"role": "user", "content": "hi"}]) == "<a>hi<b>"
    named = gguf_chat_template(file_with(metadata | {"chat_template.tool_use": "tools"}))
    assert named.render([], tools=[{"name": "f"}]) == "tools"
    assert named.render([]) == "<a>"


def test_a_file_without_a_chat_template_gives_none():
    assert gguf_chat_template(tiny_vocabulary.byte_level()) is None


def test_a_chat_template_that_is_not_jinja_names_the_file():
    with pytest.raises(CheckpointError, match=r"toy\.gguf: chat template 'default', line 1: "):
        gguf_chat_template(file_with({"chat_template": "{% for %}"}))
