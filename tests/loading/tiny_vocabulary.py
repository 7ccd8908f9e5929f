"""Small vocabularies as GGUF metadata: byte-level BPE by hand, SentencePiece BPE trained by its library."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

import numpy as np
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer, sentencepiece_model_pb2

from jaxinfer.loading.gguf_format import GgufFile
from jaxinfer.loading.tokenizer import BYTE_OF_CHARACTER

CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the other dog barks at the fox",
    "she sells sea shells by the sea shore;  the shells she sells are sea shells",
    "def function(argument):    return argument + 1   # a comment about the function",
    "banana bandana ananas nananana aaaa aaaaaaa abababab  ababab bababa",
    "größer schöner naïve café œuvre  übermäßig",
    "в начале было слово и слово было",
    "日本語の文章 日本の文 中文的文章",
) * 3


def file_with(metadata: dict[str, Any]) -> GgufFile:
    """A GGUF file as read, with these `tokenizer.*` values and nothing else."""
    values = {f"tokenizer.{key}": value for key, value in metadata.items() if value is not None}
    return GgufFile(Path("toy.gguf"), values, {}, np.zeros(0, np.uint8))


def byte_level(**changes: Any) -> GgufFile:
    """Three control tokens, one user-defined, the 256 bytes and a few merges; `changes` to `ggml.*`."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = ["t h", "th e", "Ġ the", "Ġ a", "1 2", "Ã ©", "ð Ł", "ðŁ ĺ", "Ċ Ċ", "Ġ Ġ"]
    merges[2] = "Ġ the"
    tokens = [*control, *BYTE_OF_CHARACTER, *(merge.replace(" ", "") for merge in merges), "<think>"]
    kinds = [3] * len(control) + [1] * (len(tokens) - len(control) - 1) + [4]
    values = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": np.array(kinds, np.int32),
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    }
    return file_with({f"ggml.{key}": value for key, value in (values | changes).items()})


@functools.cache
def trained(add_dummy_prefix: bool) -> SentencePieceProcessor:
    """A SentencePiece BPE model of the kind that Gemma and Llama 2 use."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        character_coverage=0.99,
        split_by_whitespace=False,
        split_digits=True,
        normalization_rule_name="identity",
        add_dummy_prefix=add_dummy_prefix,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<td>", "\n", "\n\n", "\u2581\u2581\u2581"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return SentencePieceProcessor(model_proto=model.getvalue())


def sentence_piece(add_dummy_prefix: bool, **changes: Any) -> GgufFile:
    """The trained model as a converter writes it to a GGUF file; `changes` to `ggml.*`."""
    model = sentencepiece_model_pb2.ModelProto.FromString(trained(add_dummy_prefix).serialized_model_proto())
    defined = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
    values = {
        "model": "llama",
        # Converters write user-defined pieces with plain spaces.
        "tokens": [p.piece.replace("\u2581", " ") if p.type == defined else p.piece for p in model.pieces],
        "scores": np.array([piece.score for piece in model.pieces], np.float32),
        "token_type": np.array([piece.type for piece in model.pieces], np.int32),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": True,
        "add_space_prefix": add_dummy_prefix,
    }
    return file_with({f"ggml.{key}": value for key, value in (values | changes).items()})
