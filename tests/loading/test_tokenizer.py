import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxinfer.loading.gguf_tokenizer import gguf_tokenizer
from tests.loading import tiny_vocabulary

TOKENIZERS = {
    "byte_level": gguf_tokenizer(tiny_vocabulary.byte_level()),
    "sentence_piece": gguf_tokenizer(tiny_vocabulary.sentence_piece(False)),
    "sentence_piece_with_prefix": gguf_tokenizer(tiny_vocabulary.sentence_piece(True)),
}
KINDS = pytest.mark.parametrize("kind", TOKENIZERS)


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, TOKENIZERS[kind].vocab_size - 1), max_size=30)


@KINDS
@given(data=st.data())
def test_a_stream_gives_what_decoding_at_once_gives_for_any_ids_and_cuts(kind, data):
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(ids_of(kind))
    skip = data.draw(st.booleans())
    decoder = tokenizer.stream_decoder(skip_special_tokens=skip)
    texts = []
    start = 0
    while start < len(ids):
        end = start + data.draw(st.integers(1, 4))
        texts.append(decoder.push(ids[start:end]))
        start = end
    assert "".join(texts) + decoder.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@KINDS
@given(data=st.data())
def test_a_stream_never_takes_back_or_splits_a_character(kind, data):
    tokenizer = TOKENIZERS[kind]
    text = data.draw(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
    decoder = tokenizer.stream_decoder()
    shown = ""
    for index in tokenizer.encode(text, add_special_tokens=False):
        shown += decoder.push(index)
        assert text.startswith(shown)
    assert shown == text
    assert decoder.flush() == ""


@KINDS
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=40))
@example("")
@example(" ")
@example("  two leading, one trailing ")
@example("👩‍👩‍👧‍👦 e\u0301 \x00 \r\n\t")
def test_every_text_survives_encoding_and_decoding(kind, text):
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@KINDS
def test_a_character_that_never_ends_is_marked_when_the_stream_ends(kind):
    tokenizer = TOKENIZERS[kind]
    cut = tokenizer.encode("a🙂", add_special_tokens=False)[:-1]
    decoder = tokenizer.stream_decoder()
    assert decoder.push(cut) == "a"
    assert decoder.flush() == "\ufffd"
    assert tokenizer.decode(cut) == "a\ufffd"


@KINDS
def test_token_bytes_join_to_the_text(kind):
    tokenizer = TOKENIZERS[kind]
    text = "the é🙂 x   y"
    joined = b"".join(
        tokenizer.token_bytes(index) for index in tokenizer.encode(text, add_special_tokens=False)
    )
    assert joined.decode().removeprefix(" " if tokenizer.strips_leading_space else "") == text


@KINDS
def test_control_tokens_are_left_out_unless_asked_for(kind):
    tokenizer = TOKENIZERS[kind]
    end = tokenizer.eos_token_ids[0]
    ids = [*tokenizer.encode("the", add_special_tokens=False), end]
    assert tokenizer.decode(ids) == "the"
    spelled = tokenizer.token_bytes(end).decode()
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"the{spelled}"
    assert end in tokenizer.special_ids


@KINDS
@pytest.mark.parametrize("index", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_refused(kind, index):
    tokenizer = TOKENIZERS[kind]
    with pytest.raises(
        ValueError, match=f"token id {index} is outside the vocabulary of {tokenizer.vocab_size}"
    ):
        tokenizer.decode([index])


@KINDS
def test_a_rendered_text_gets_no_bos_beside_its_own(kind):
    tokenizer = TOKENIZERS[kind]
    bos = tokenizer.token_bytes(tokenizer.bos_token_id).decode()
    assert tokenizer.encode_rendered(f"{bos}the").count(tokenizer.bos_token_id) == 1
    assert tokenizer.encode_rendered("the").count(tokenizer.bos_token_id) == 0
