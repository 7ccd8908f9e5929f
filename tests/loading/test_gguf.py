import tracemalloc

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jaxinfer.loading import tensor_source
from jaxinfer.loading.gguf import GgufSource
from jaxinfer.loading.gguf_config import llama3_factors
from jaxinfer.loading.tensor_source import CheckpointError
from tests.loading import tiny_gguf
from tests.loading.tiny_gguf import hugging_face_weights, stored_weights, write_gguf, write_tiny

ARCHS = ("llama", "gemma3")


@pytest.mark.parametrize("arch", ARCHS)
def test_tensors_come_back_under_their_hugging_face_names(tmp_path, arch):
    source = GgufSource(write_tiny(tmp_path / "tiny.gguf", arch))
    weights = hugging_face_weights(arch)
    assert source.names() == weights.keys()
    for name, weight in weights.items():
        assert source.shape(name) == weight.shape
        read = source.read(name, np.float32)
        assert read.dtype == np.float32
        assert np.array_equal(read, weight), name
        assert np.array_equal(source.read(name, ml_dtypes.bfloat16), weight.astype(ml_dtypes.bfloat16))


def test_biases_of_interleaved_heads_are_put_in_order_too(tmp_path):
    stored = stored_weights("llama", hugging_face_weights("llama"))
    bias = np.arange(tiny_gguf.HEADS * tiny_gguf.HEAD_DIM, dtype=np.float32)
    stored["blk.0.attn_q.bias"] = tiny_gguf.interleaved(bias[:, None], tiny_gguf.HEADS)[:, 0]
    source = GgufSource(write_gguf(tmp_path / "t.gguf", "llama", stored))
    assert np.array_equal(source.read("model.layers.0.self_attn.q_proj.bias", np.float32), bias)


def test_reading_gives_a_new_array_that_the_caller_owns(tmp_path):
    source = GgufSource(write_tiny(tmp_path / "tiny.gguf", "llama"))
    for name in ("model.norm.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        first = source.read(name, np.float32)
        kept = first.copy()
        first[...] = 0
        assert np.array_equal(source.read(name, np.float32), kept)


@pytest.mark.parametrize("arch", ARCHS)
def test_only_gemma_files_hold_the_one_of_norm_scales(tmp_path, arch):
    source = GgufSource(write_tiny(tmp_path / "tiny.gguf", arch))
    assert source.norm_scales_include_one is (arch == "gemma3")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("block_elements", [1, 100, 1 << 17])
def test_quantised_tensors_equal_the_gguf_library_whatever_the_blocks(
    tmp_path, monkeypatch, kind, block_elements
):
    monkeypatch.setattr(tensor_source, "BLOCK_ELEMENTS", block_elements)
    kind = GGMLQuantizationType[kind]
    stored = stored_weights("llama", hugging_face_weights("llama"))
    packed = {name: kind for name, weight in stored.items() if weight.ndim == 2}
    source = GgufSource(write_gguf(tmp_path / "q.gguf", "llama", stored, kinds=packed))

    embedding = gguf.dequantize(gguf.quantize(stored["token_embd.weight"], kind), kind)
    assert np.array_equal(source.read("model.embed_tokens.weight", np.float32), embedding)
    rounded = embedding.astype(ml_dtypes.bfloat16)
    assert np.array_equal(source.read("model.embed_tokens.weight", ml_dtypes.bfloat16), rounded)

    # Quantisation works along rows, so undoing the order of rows commutes with it.
    query = hugging_face_weights("llama")["model.layers.1.self_attn.q_proj.weight"]
    expected = gguf.dequantize(gguf.quantize(query, kind), kind)
    assert np.array_equal(source.read("model.layers.1.self_attn.q_proj.weight", np.float32), expected)


def test_peak_memory_is_the_result_and_a_few_blocks(tmp_path):
    rows, columns = 40_000, 256
    stored = stored_weights("llama", hugging_face_weights("llama"))
    stored["token_embd.weight"] = np.ones((rows, columns), np.float32)
    kinds = {"token_embd.weight": GGMLQuantizationType.Q8_0}
    source = GgufSource(write_gguf(tmp_path / "big.gguf", "llama", stored, kinds=kinds))
    tracemalloc.start()
    values = source.read("model.embed_tokens.weight", ml_dtypes.bfloat16)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    block_bytes = 4 * tensor_source.BLOCK_ELEMENTS
    assert values.nbytes <= peak_bytes <= values.nbytes + 3 * tensor_source.MAX_THREADS * block_bytes


def test_tensors_without_a_hugging_face_name_are_listed_by_their_own(tmp_path):
    stored = stored_weights("llama", hugging_face_weights("llama"))
    stored |= {"blk.0.mystery.weight": np.ones((2, 2), np.float32), "other": np.ones(3, np.float32)}
    source = GgufSource(write_gguf(tmp_path / "extra.gguf", "llama", stored))
    assert source.names() - hugging_face_weights("llama").keys() == {"blk.0.mystery.weight", "other"}
    assert np.array_equal(source.read("other", np.float32), np.ones(3))


def test_a_name_that_is_not_there_names_the_file(tmp_path):
    source = GgufSource(write_tiny(tmp_path / "tiny.gguf", "llama"))
    for ask in (lambda: source.read("nope", np.float32), lambda: source.shape("nope")):
        with pytest.raises(CheckpointError, match=r"tiny\.gguf: has no tensor 'nope'"):
            ask()


@pytest.mark.parametrize("dtype", [np.float16, np.int32, np.float64])
def test_other_dtypes_than_two_are_refused(tmp_path, dtype):
    source = GgufSource(write_tiny(tmp_path / "tiny.gguf", "llama"))
    with pytest.raises(ValueError, match="takes dtype float32 or bfloat16; got"):
        source.read("model.norm.weight", dtype)


def test_a_tensor_that_cannot_be_expanded_is_named(tmp_path):
    stored = stored_weights("llama", hugging_face_weights("llama"))
    stored["blk.0.ffn_up.weight"] = np.ones((tiny_gguf.MLP, tiny_gguf.EMBED), np.int32)
    stored["output_norm.weight"] = np.ones(tiny_gguf.EMBED, np.int8)
    source = GgufSource(write_gguf(tmp_path / "odd.gguf", "llama", stored))
    with pytest.raises(CheckpointError, match=r"odd\.gguf: tensor 'blk.0.ffn_up.weight' is stored as I32"):
        source.read("model.layers.0.mlp.up_proj.weight", np.float32)
    with pytest.raises(CheckpointError, match=r"odd\.gguf: tensor 'output_norm.weight' is stored as I8"):
        source.read("model.norm.weight", np.float32)


def test_heads_that_do_not_divide_the_rows_are_refused(tmp_path):
    stored = stored_weights("llama", hugging_face_weights("llama"))
    stored["blk.0.attn_q.weight"] = np.ones((12, tiny_gguf.EMBED), np.float32)
    source = GgufSource(write_gguf(tmp_path / "t.gguf", "llama", stored))
    with pytest.raises(
        CheckpointError, match=r"'blk.0.attn_q.weight' has 12 rows, not a multiple of the head size 8"
    ):
        source.read("model.layers.0.self_attn.q_proj.weight", np.float32)


def test_config_of_a_llama_file(tmp_path):
    config = GgufSource(write_tiny(tmp_path / "tiny.gguf", "llama")).config
    assert config == {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "vocab_size": 300,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def test_config_of_a_gemma_file(tmp_path):
    config = GgufSource(
        write_tiny(tmp_path / "tiny.gguf", "gemma3", block_count=13, rope__freq_base=1e6)
    ).config
    assert config["model_type"] == "gemma3_text"
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    assert config["sliding_window"] == 16
    full = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    assert (len(config["layer_types"]), full) == (13, [5, 11])
    assert config["rope_parameters"] == {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }
    assert config["query_pre_attn_scalar"] == 8


def test_the_largest_gemma_scales_queries_by_the_embedding_share_of_a_head(tmp_path):
    config = GgufSource(
        write_tiny(tmp_path / "tiny.gguf", "gemma3", block_count=62, attention__head_count=2)
    ).config
    assert config["query_pre_attn_scalar"] == tiny_gguf.EMBED // 2


@pytest.mark.parametrize(
    ("pattern", "full"),
    [(3, [2]), (1, [0, 1, 2, 3]), ([True, False, True, False], [1, 3])],
)
def test_a_sliding_pattern_in_the_file_is_followed(tmp_path, pattern, full):
    path = write_tiny(tmp_path / "t.gguf", "gemma3", block_count=4, attention__sliding_window_pattern=pattern)
    kinds = GgufSource(path).config["layer_types"]
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == full


def test_linear_rope_scaling_of_gemma_is_on_full_layers_only(tmp_path):
    path = write_tiny(tmp_path / "t.gguf", "gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0)
    rope = GgufSource(path).config["rope_parameters"]
    assert rope["full_attention"] == {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 10_000.0}


def with_rope_factors(path, factors):
    stored = stored_weights("llama", hugging_face_weights("llama"))
    stored["rope_freqs.weight"] = np.asarray(factors, np.float32)
    values = tiny_gguf.metadata("llama") | {"llama.rope.freq_base": 500_000.0}
    return write_gguf(path, "llama", stored, values=values)


def test_stored_rope_factors_give_llama3_scaling_and_are_not_an_extra_tensor(tmp_path):
    # The published rule at head size 8: wavelengths 6.3, 167, 4443 and 118143 against bounds 2048 and 8192.
    middle = (8192 / (2 * np.pi * 500_000.0**0.5) - 1) / 3
    factors = [1.0, 1.0, 1 / ((1 - middle) / 32 + middle), 32.0]
    source = GgufSource(with_rope_factors(tmp_path / "t.gguf", factors))
    assert source.config["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert source.names() == hugging_face_weights("llama").keys()
    np.testing.assert_allclose(llama3_factors(500_000.0, 8, 32.0), factors)


@pytest.mark.parametrize("factors", [[1.0, 1.0, 5.0, 32.0], [1.0, 1.0, 32.0], [0.0] * 4])
def test_other_rope_factors_are_refused(tmp_path, factors):
    with pytest.raises(CheckpointError, match=r"t\.gguf: tensor 'rope_freqs\.weight'"):
        GgufSource(with_rope_factors(tmp_path / "t.gguf", factors))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rope__scaling__type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"rope__scaling__type": "linear"}, "rope.scaling.factor' must be a positive number; got None"),
        ({"expert_count": 8}, "'llama.expert_count' = 8 is not supported"),
        ({"attention__causal": False}, "'llama.attention.causal' = False is not supported"),
        ({"attention__sliding_window": 64}, "'llama.attention.sliding_window' is not supported"),
        ({"embedding_length": None}, "'llama.embedding_length' must be a positive integer; got None"),
        ({"block_count": 0}, "'llama.block_count' must be a positive integer; got 0"),
        ({"block_count": "2"}, "'llama.block_count' must be a positive integer; got '2'"),
        ({"attention__head_count": [4, 4]}, "must be a positive integer; got an array of 2"),
        ({"attention__value_length": 16}, "keys and values of different sizes"),
        ({"rope__dimension_count": 4}, "rope over 4 of 8 dims"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "must be a positive number; got nan"),
    ],
)
def test_metadata_that_cannot_be_followed_is_refused(tmp_path, changes, problem):
    path = write_tiny(tmp_path / "t.gguf", "llama", **changes)
    with pytest.raises(CheckpointError) as caught:
        GgufSource(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert problem in str(caught.value)


def test_an_architecture_that_is_not_known_is_named(tmp_path):
    path = write_gguf(tmp_path / "t.gguf", "mamba", {}, values={})
    with pytest.raises(CheckpointError, match="architecture 'mamba' is not supported; known: gemma3, llama"):
        GgufSource(path)


def test_a_file_without_an_embedding_is_refused(tmp_path):
    path = write_gguf(tmp_path / "t.gguf", "llama", {"output_norm.weight": np.ones(32, np.float32)})
    with pytest.raises(CheckpointError, match=r"tensor 'token_embd\.weight' is missing"):
        GgufSource(path)


def test_a_file_with_an_output_matrix_is_not_tied(tmp_path):
    weights = hugging_face_weights("llama", tied=False)
    source = GgufSource(write_gguf(tmp_path / "t.gguf", "llama", stored_weights("llama", weights)))
    assert source.config["tie_word_embeddings"] is False
    assert np.array_equal(source.read("lm_head.weight", np.float32), weights["lm_head.weight"])


def test_two_spellings_of_one_tensor_are_refused(tmp_path):
    stored = stored_weights("llama", hugging_face_weights("llama"))
    stored["blk.00.attn_v.weight"] = stored["blk.0.attn_v.weight"]
    with pytest.raises(CheckpointError, match=r"are both 'model.layers.0.self_attn.v_proj.weight'"):
        GgufSource(write_gguf(tmp_path / "t.gguf", "llama", stored))
