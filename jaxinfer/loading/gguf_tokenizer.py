"""The tokenizer inside a GGUF file.

`tokenizer.ggml.model` "gpt2" is byte-level BPE with explicit merges; the regular expression that
splits text first is known by the name in `tokenizer.ggml.pre`. "llama" is SentencePiece BPE: pieces
with scores, from which the merges are derived.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxinfer.loading.chat_template import DEFAULT, ChatTemplate, ChatTemplateError
from jaxinfer.loading.gguf_format import GgufFile
from jaxinfer.loading.tensor_source import CheckpointError
from jaxinfer.loading.tokenizer import SPACE_MARK, Tokenizer

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_SPECIAL_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

# Changes whenever the same metadata would give other ids or texts.
_BUILDER_VERSION = "1"

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes.

    Raises:
        CheckpointError: no vocabulary, or a kind of tokenizer that is not supported.
    """
    vocabulary = _Vocabulary(file)
    try:
        backend = _backend(vocabulary)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception, for example for an impossible merge
        raise vocabulary.error(f"its tokenizer cannot be built: {error}") from None
    marks_spaces = vocabulary.model == "llama"
    adds_space = marks_spaces and vocabulary.flag("add_space_prefix", True)
    return Tokenizer(
        SpacePrefixing(backend) if adds_space else backend,
        piece_encoding="space_mark" if marks_spaces else "byte_level",
        strip_leading_space=adds_space,
        vocab_size=len(vocabulary.tokens),
        bos_token_id=vocabulary.optional_id("bos_token_id"),
        eos_token_ids=[index for key in _END_KEYS if (index := vocabulary.optional_id(key)) is not None],
        fingerprint=vocabulary.fingerprint(),
    )


def _backend(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    if vocabulary.model == "gpt2":
        backend = _byte_level(vocabulary)
    elif vocabulary.model == "llama":
        backend = _sentence_piece(vocabulary)
    else:
        raise vocabulary.error(f"tokenizer model {vocabulary.model!r} is not supported; known: gpt2, llama")
    vocabulary.add_tokens(backend)
    vocabulary.frame_raw_text(backend)
    return backend


def gguf_chat_template(file: GgufFile) -> ChatTemplate | None:
    """The chat template in a GGUF file, None when it has none.

    Raises:
        CheckpointError: a template that cannot be read.
    """
    key = "tokenizer.chat_template"
    if key not in file.metadata:
        return None
    sources = {DEFAULT: file.metadata[key]}
    for name, value in file.metadata.items():
        if name.startswith(f"{key}."):
            sources[name.removeprefix(f"{key}.")] = value
    special = {}
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    for name, id_key in _SPECIAL_NAMES.items():
        index = file.metadata.get(f"tokenizer.ggml.{id_key}")
        if isinstance(index, int) and 0 <= index < len(tokens):
            special[name] = tokens[index]
    try:
        return ChatTemplate(sources, special_tokens=special)
    except ChatTemplateError as error:
        raise CheckpointError(f"{file.path}: {error}") from None


class _Vocabulary:
    """Typed access to the `tokenizer.ggml.*` keys; every failure names file and key."""

    def __init__(self, file: GgufFile):
        self.file = file
        self.model: str = self._get("model", str)
        self.tokens: list[str] = self._get("tokens", list)
        self.types = self._parallel("token_type", default=NORMAL)

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {problem}")

    def _get(self, key: str, kind: type) -> Any:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, kind) or (kind in (list, str) and not value):
            got = "nothing" if value is None else type(value).__name__
            raise self.error(f"metadata 'tokenizer.ggml.{key}' must be a {kind.__name__}; got {got}")
        return value

    def _parallel(self, key: str, default: float) -> np.ndarray:
        values = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if values is None:
            return np.full(len(self.tokens), default)
        if not isinstance(values, np.ndarray) or len(values) != len(self.tokens):
            raise self.error(f"metadata 'tokenizer.ggml.{key}' must have one entry for each token")
        return values

    def scores(self) -> np.ndarray:
        self._get("scores", np.ndarray)
        return self._parallel("scores", default=0.0)

    def merges(self) -> list[tuple[str, str]]:
        pairs = [tuple(merge.split(" ")) for merge in self._get("merges", list)]
        broken = next((index for index, pair in enumerate(pairs) if len(pair) != 2), None)
        if broken is not None:
            raise self.error(f"metadata 'tokenizer.ggml.merges'[{broken}] is not a pair of tokens")
        return pairs

    def flag(self, key: str, default: bool) -> bool:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise self.error(f"metadata 'tokenizer.ggml.{key}' must be true or false; got {value!r}")
        return value

    def optional_id(self, key: str) -> int | None:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.error(f"metadata 'tokenizer.ggml.{key}' = {value!r} is outside the vocabulary")
        return value

    def vocab(self) -> dict[str, int]:
        vocab = {token: index for index, token in enumerate(self.tokens)}
        if len(vocab) != len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if vocab[token] != index)
            raise self.error(f"metadata 'tokenizer.ggml.tokens' lists {twice!r} twice")
        return vocab

    def of_type(self, *types: int) -> list[int]:
        return np.flatnonzero(np.isin(self.types, types)).tolist()

    def add_tokens(self, backend: tokenizers.Tokenizer) -> None:
        """Control tokens are found in the raw text, user-defined ones after SentencePiece's escaping."""
        marks_spaces = self.model == "llama"
        control = [
            AddedToken(self.tokens[i], special=True, normalized=False) for i in self.of_type(CONTROL, UNKNOWN)
        ]
        defined = [AddedToken(self.tokens[i], normalized=marks_spaces) for i in self.of_type(USER_DEFINED)]
        backend.add_special_tokens(control)
        backend.add_tokens(defined)

    def frame_raw_text(self, backend: tokenizers.Tokenizer) -> None:
        """BOS in front and EOS behind, as the file says; SentencePiece files add BOS by default."""
        before = self._framing_token("bos", self.model == "llama")
        after = self._framing_token("eos", False)
        framed = [token for token, _ in before] + ["$A"] + [token for token, _ in after]
        if before or after:
            template = processors.TemplateProcessing(single=framed, pair=None, special_tokens=before + after)
            backend.post_processor = template

    def _framing_token(self, name: str, default: bool) -> list[tuple[str, int]]:
        if not self.flag(f"add_{name}_token", default):
            return []
        index = self.optional_id(f"{name}_token_id")
        if index is None:
            raise self.error(
                f"metadata 'tokenizer.ggml.{name}_token_id' is missing but add_{name}_token is set"
            )
        return [(self.tokens[index], index)]

    def fingerprint(self) -> str:
        digest = hashlib.sha256(_BUILDER_VERSION.encode())
        for key in sorted(self.file.metadata):
            if key.startswith("tokenizer.ggml."):
                value = self.file.metadata[key]
                if isinstance(value, list):
                    encoded = "\0".join(value).encode()
                elif isinstance(value, np.ndarray):
                    encoded = value.tobytes()
                else:
                    encoded = repr(value).encode()
                digest.update(f"\0{key}\0{len(encoded)}\0".encode())
                digest.update(encoded)
        return digest.hexdigest()


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    name = vocabulary.file.metadata.get("tokenizer.ggml.pre")
    if name not in _SPLITS:
        raise vocabulary.error(
            f"pre-tokenizer {name!r} is not supported; known: {', '.join(sorted(_SPLITS))}"
        )
    model = models.BPE(
        vocab=vocabulary.vocab(),
        merges=vocabulary.merges(),
        ignore_merges=name in ("llama-bpe", "llama3"),
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _SPLITS[name]()
    backend.decoder = decoders.ByteLevel()
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _gpt2_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


def _regex_split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_SPLITS = {
    "gpt-2": _gpt2_split,
    "smollm": _digits_then_gpt2_split,
    "llama-bpe": lambda: _regex_split(_LLAMA3_SPLIT),
    "llama3": lambda: _regex_split(_LLAMA3_SPLIT),
    "qwen2": lambda: _regex_split(_QWEN2_SPLIT),
}


class SpacePrefixing:
    """A backend that puts a space before every stretch of text between control tokens.

    SentencePiece does so for each text it is given, and control tokens lie between the texts. A `Prepend`
    normalizer would put the space before user-defined tokens inside a text as well.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        added = backend.get_added_tokens_decoder().values()
        control = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self._control = re.compile("(" + "|".join(map(re.escape, control)) + ")" if control else "(?!)()")

    def encode(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        parts = self._control.split(text)
        parts[::2] = [f" {part}" if part else "" for part in parts[::2]]
        return self._backend.encode("".join(parts), add_special_tokens=add_special_tokens)

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self._backend.get_added_tokens_decoder()

    def id_to_token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)


def _sentence_piece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    if vocabulary.flag("remove_extra_whitespaces", False):
        raise vocabulary.error("metadata 'tokenizer.ggml.remove_extra_whitespaces' = True is not supported")
    vocab = vocabulary.vocab()
    unknown = vocabulary.optional_id("unknown_token_id")
    model = models.BPE(
        vocab=vocab,
        merges=derived_merges(vocabulary.tokens, vocabulary.scores(), vocabulary.of_type(NORMAL)),
        byte_fallback=bool(vocabulary.of_type(BYTE)),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", SPACE_MARK)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def derived_merges(tokens: list[str], scores: np.ndarray, normal: list[int]) -> list[tuple[str, str]]:
    """The merges that make BPE do what SentencePiece does with scores: join the best-scored pair first.

    Every way to cut a normal piece into two normal pieces is a merge; merges are ordered by the score of
    the piece they make, best first. Control, byte and user-defined pieces neither merge nor result.
    """
    known = {tokens[index] for index in normal}
    order = np.asarray(normal)[np.argsort(-scores[normal], kind="stable")]
    best_first = (tokens[index] for index in order.tolist())
    return [
        (left, right)
        for piece in best_first
        for cut in range(1, len(piece))
        if (right := piece[cut:]) in known and (left := piece[:cut]) in known
    ]
