"""The known models as their files really are, against transformers and sentencepiece (see tests/oracles)."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxinfer.loading import Checkpoint, open_checkpoint, resolve

FIXTURES = Path(__file__).parent / "fixtures"
KNOWN = [pytest.param(name, marks=pytest.mark.real(name)) for name in ("smollm2-135m", "gemma3-270m")]

_opened: dict[str, Checkpoint] = {}


def opened(name: str) -> Checkpoint:
    if name not in _opened:
        _opened[name] = open_checkpoint(resolve(name))
    return _opened[name]


def fixture(kind: str, name: str) -> dict:
    return json.loads((FIXTURES / f"{kind}-{name}.json").read_text())


@pytest.mark.parametrize("name", KNOWN)
def test_config_says_what_transformers_reads_from_the_file(name):
    config = opened(name).config
    for key, value in fixture("tensors", name)["config"].items():
        if key == "rms_norm_eps":
            assert config[key] == pytest.approx(value)
        else:
            assert config.get(key) == value, key
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "bfloat16"


@pytest.mark.real("gemma3-270m")
def test_gemma_has_three_global_layers_and_a_local_rope_base_that_the_file_lacks():
    config = opened("gemma3-270m").config
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11, 17]
    assert config["sliding_window"] == 512
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 10_000
    assert config["rope_parameters"]["full_attention"]["rope_theta"] == 1_000_000
    assert config["query_pre_attn_scalar"] == 256


@pytest.mark.parametrize("name", KNOWN)
def test_tensors_equal_what_transformers_reads_from_the_file(name):
    source = opened(name).source
    tensors = fixture("tensors", name)["tensors"]
    offset = 1.0 if source.norm_scales_include_one else 0.0
    for tensor, expected in tensors.items():
        values = source.read(tensor, np.float32)
        if tensor.endswith("norm.weight"):
            values = values - np.float32(offset)
        assert list(values.shape) == expected["shape"], tensor
        assert values.sum(dtype=np.float64) == pytest.approx(expected["sum"], rel=1e-6, abs=1e-3), tensor
        for row, numbers in expected["rows"].items():
            np.testing.assert_allclose(np.atleast_1d(values[int(row)])[:12], numbers, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", KNOWN)
def test_every_tensor_has_a_hugging_face_name(name):
    checkpoint = opened(name)
    layers = checkpoint.config["num_hidden_layers"]
    names = checkpoint.source.names()
    assert all(tensor.startswith("model.") for tensor in names)
    assert len({tensor.split(".")[2] for tensor in names if tensor.startswith("model.layers.")}) == layers


@pytest.mark.real("smollm2-135m")
def test_bfloat16_is_float32_rounded():
    source = opened("smollm2-135m").source
    name = "model.layers.3.self_attn.k_proj.weight"
    rounded = source.read(name, np.float32).astype(ml_dtypes.bfloat16)
    assert np.array_equal(source.read(name, ml_dtypes.bfloat16), rounded)


@pytest.mark.parametrize("name", KNOWN)
def test_token_ids_of_mixed_text_equal_the_reference_library(name):
    tokenizer = opened(name).tokenizer
    for text, ids in fixture("tokens", name)["texts"]:
        assert tokenizer.encode(text) == ids, text


@pytest.mark.parametrize("name", KNOWN)
def test_decoding_gives_the_text_back_whole_and_streamed(name):
    tokenizer = opened(name).tokenizer
    for text, _ in fixture("tokens", name)["texts"]:
        # U+2581 is the one character that SentencePiece cannot tell from a space.
        expected = text.replace("\u2581", " ") if name == "gemma3-270m" else text
        ids = tokenizer.encode(text, add_special_tokens=False)
        decoder = tokenizer.stream_decoder(skip_special_tokens=False)
        streamed = "".join([decoder.push(index) for index in ids]) + decoder.flush()
        assert tokenizer.decode(ids, skip_special_tokens=False) == streamed == expected


@pytest.mark.real("smollm2-135m")
def test_rendered_chats_and_their_ids_equal_transformers():
    checkpoint = opened("smollm2-135m")
    for chat in fixture("tokens", "smollm2-135m")["chats"]:
        text = checkpoint.chat_template.render(chat["messages"])
        assert text == chat["text"]
        assert checkpoint.tokenizer.encode_rendered(text) == chat["ids"]


@pytest.mark.real("smollm2-135m")
def test_smollm2_ends_an_answer_at_im_end_and_adds_no_bos():
    tokenizer = opened("smollm2-135m").tokenizer
    assert tokenizer.eos_token_ids == (tokenizer.token_id("<|im_end|>"),)
    assert tokenizer.encode("") == []


@pytest.mark.real("gemma3-270m")
def test_gemma_base_has_a_bos_and_no_chat_template():
    checkpoint = opened("gemma3-270m")
    assert checkpoint.tokenizer.encode("") == [checkpoint.tokenizer.bos_token_id]
    assert checkpoint.tokenizer.encode_rendered("<bos>hi")[0] == checkpoint.tokenizer.bos_token_id
    assert checkpoint.tokenizer.encode_rendered("<bos>hi").count(checkpoint.tokenizer.bos_token_id) == 1
    assert checkpoint.chat_template is None
