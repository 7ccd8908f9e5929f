"""The toy tokenizer and templates keep the rules that the real ones have."""

import pytest

from jaxinfer.loading.chat_template import ChatTemplateError
from jaxinfer.testing import tiny_model, toy_chat_template, toy_tokenizer

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "yo"}
SYSTEM = {"role": "system", "content": "be kind"}


def test_a_token_is_a_byte():
    tokenizer = toy_tokenizer(adds_bos=False)
    assert tokenizer.encode("hé") == list("hé".encode())
    assert tokenizer.decode(list("日本".encode())) == "日本"
    assert tokenizer.vocab_size == 266


def test_raw_text_gets_a_bos_where_asked_and_a_rendered_chat_never():
    tokenizer = toy_tokenizer(adds_bos=True)
    assert tokenizer.encode("a") == [tokenizer.bos_token_id, ord("a")]
    assert tokenizer.encode_rendered("<bos>a") == [tokenizer.bos_token_id, ord("a")]
    assert toy_tokenizer(adds_bos=False).encode("a") == [ord("a")]


def test_control_tokens_are_one_id_each_and_end_an_answer():
    tokenizer = toy_tokenizer(adds_bos=False)
    ids = tokenizer.encode("<|im_end|><end_of_turn><eos>")
    assert len(ids) == 3
    assert sorted(ids) == list(tokenizer.eos_token_ids)
    assert tokenizer.decode(ids) == ""


def test_chatml_takes_any_messages():
    text = toy_chat_template("chatml").render([SYSTEM, USER, USER])
    turns = [("system", "be kind"), ("user", "hi"), ("user", "hi")]
    expected = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert text == expected + "<|im_start|>assistant\n"


def test_gemma_folds_the_system_message_into_the_first_user_turn():
    text = toy_chat_template("gemma").render([SYSTEM, USER, ASSISTANT], add_generation_prompt=False)
    assert text == (
        "<bos><start_of_turn>user\nbe kind\n\nhi<end_of_turn>\n<start_of_turn>model\nyo<end_of_turn>\n"
    )


@pytest.mark.parametrize(
    "messages", [[USER, USER], [ASSISTANT], [SYSTEM, ASSISTANT], [USER, ASSISTANT, SYSTEM]]
)
def test_gemma_refuses_roles_that_do_not_alternate(messages):
    with pytest.raises(ChatTemplateError, match="must alternate"):
        toy_chat_template("gemma").render(messages)


def test_a_longer_gemma_chat_starts_with_the_shorter_one():
    template = toy_chat_template("gemma")
    shorter = template.render([USER], add_generation_prompt=False)
    assert template.render([USER, ASSISTANT, USER]).startswith(shorter)


def test_an_unknown_template_is_refused_by_name():
    with pytest.raises(ValueError, match="must be one of"):
        toy_chat_template("nope")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_tiny_model_fits_its_tokenizer(family):
    model = tiny_model(family)
    assert model.config.vocab_size == model.tokenizer.vocab_size
    assert model.config.bos_token_id == model.tokenizer.bos_token_id
    ids = model.tokenizer.encode_rendered(model.chat_template.render([USER]))
    assert ids.count(model.tokenizer.bos_token_id) == (family == "gemma3")


def test_a_fingerprint_tells_seeds_and_configs_apart():
    fingerprints = {
        tiny_model(seed=0).fingerprint,
        tiny_model(seed=1).fingerprint,
        tiny_model("qwen3").fingerprint,
    }
    assert len(fingerprints) == 3
    assert tiny_model(seed=0).fingerprint in fingerprints
