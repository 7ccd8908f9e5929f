"""The tokenizer and the chat template of a Hugging Face checkpoint directory.

`tokenizer.json` holds the tokenizer itself; `tokenizer_config.json` names its BOS and EOS and may hold the
chat template; ids that end an answer are collected from there, `generation_config.json` and `config.json`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from jaxinfer.loading.chat_template import ChatTemplate, ChatTemplateError
from jaxinfer.loading.tensor_source import CheckpointError
from jaxinfer.loading.tokenizer import SPACE_MARK, Tokenizer

TOKENIZER_NAME = "tokenizer.json"
_TOKEN_OPTIONS = ("content", "special", "lstrip", "rstrip", "single_word", "normalized")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} when there is no such file. CheckpointError when it is no object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value


def directory_tokenizer(directory: Path, config: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory, None when it holds none.

    Raises:
        CheckpointError: a tokenizer that is damaged or of a kind that is not supported.
    """
    path = directory / TOKENIZER_NAME
    if not path.is_file():
        if (directory / "tokenizer.model").is_file():
            raise CheckpointError(
                f"{directory}: has tokenizer.model but no {TOKENIZER_NAME}, which is needed"
            )
        return None
    settings = read_json(directory / "tokenizer_config.json")
    backend = _read_backend(path)
    _add_missing_tokens(backend, settings, path)
    special = special_tokens(directory)
    _frame_raw_text(backend, settings, special, path)
    encoding, strips = _piece_encoding(json.loads(path.read_bytes()).get("decoder"), path)
    ends = _ids(config.get("eos_token_id"))
    ends += _ids(config.get("text_config", {}).get("eos_token_id"))
    ends += _ids(read_json(directory / "generation_config.json").get("eos_token_id"))
    if (eos := _named_id(backend, special, "eos_token", path)) is not None:
        ends.append(eos)
    bos = _named_id(backend, special, "bos_token", path)
    bos = config.get("bos_token_id") if bos is None else bos
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    for index in [*ends, *([] if bos is None else [bos])]:
        if not isinstance(index, int) or not 0 <= index < vocab_size:
            raise CheckpointError(
                f"{path}: BOS or EOS id {index!r} is outside its vocabulary of {vocab_size}"
            )
    return Tokenizer(
        backend,
        piece_encoding=encoding,
        strip_leading_space=strips,
        vocab_size=vocab_size,
        bos_token_id=bos,
        eos_token_ids=ends,
        fingerprint=_fingerprint(path, settings, bos, ends),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
        # A stored limit would cut long texts without a word.
        backend.no_truncation()
        backend.no_padding()
        backend.encode("a")  # some faults show only in use
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare Exception, and for a panic in Rust something that is not even that
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    return backend


def special_tokens(directory: Path) -> dict[str, str]:
    """Spelling of the named special tokens: `bos_token`, `eos_token` and so on, where there are any."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings = read_json(directory / name)
        for key in _SPECIAL_NAMES:
            value = settings.get(key)
            spelled = value.get("content") if isinstance(value, dict) else value
            if isinstance(spelled, str):
                found[key] = spelled
    return found


def directory_chat_template(directory: Path) -> ChatTemplate | None:
    """The chat template of a checkpoint directory, None when it has none.

    Raises:
        CheckpointError: a template that cannot be read.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        source: Any = path.read_text(encoding="utf-8")
    else:
        path = directory / "tokenizer_config.json"
        source = read_json(path).get("chat_template")
    if source is None:
        path = directory / "chat_template.json"
        source = read_json(path).get("chat_template")
    if source is None:
        return None
    try:
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}
        elif not isinstance(source, str):
            raise TypeError
    except (KeyError, TypeError):
        raise CheckpointError(
            f"{path}: its chat template is neither a text nor a list of named texts"
        ) from None
    try:
        return ChatTemplate(source, special_tokens=special_tokens(directory))
    except ChatTemplateError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [entry for entry in values if isinstance(entry, int)]


def _named_id(backend: tokenizers.Tokenizer, special: dict[str, str], name: str, path: Path) -> int | None:
    if name not in special:
        return None
    index = backend.token_to_id(special[name])
    if index is None:
        raise CheckpointError(f"{path}: has no token {special[name]!r}, which is the {name}")
    return index


def _add_missing_tokens(backend: tokenizers.Tokenizer, settings: dict[str, Any], path: Path) -> None:
    """Tokens that only `added_tokens_decoder` lists must get exactly the ids it gives them."""
    try:
        listed = {
            int(index): AddedToken(**{key: entry[key] for key in _TOKEN_OPTIONS if key in entry})
            for index, entry in (settings.get("added_tokens_decoder") or {}).items()
        }
    except (AttributeError, TypeError, ValueError):
        raise CheckpointError(f"{path}: 'added_tokens_decoder' in tokenizer_config.json is damaged") from None
    for index in sorted(listed):
        token = listed[index]
        if backend.token_to_id(token.content) is None:
            backend.add_tokens([token])
        got = backend.token_to_id(token.content)
        if got != index:
            raise CheckpointError(
                f"{path}: token {token.content!r} has id {got}, but tokenizer_config.json says {index}"
            )


def _frame_raw_text(
    backend: tokenizers.Tokenizer, settings: dict[str, Any], special: dict[str, str], path: Path
) -> None:
    """`add_bos_token` and `add_eos_token`, where either is given, decide over the stored framing."""
    if "add_bos_token" not in settings and "add_eos_token" not in settings:
        return
    framed: dict[str, list[tuple[str, int]]] = {}
    for name in ("bos_token", "eos_token"):
        index = _named_id(backend, special, name, path) if settings.get(f"add_{name}") else None
        framed[name] = [] if index is None else [(special[name], index)]
    before, after = framed["bos_token"], framed["eos_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=[token for token, _ in before] + ["$A"] + [token for token, _ in after],
        pair=None,
        special_tokens=before + after,
    )


def _piece_encoding(decoder: Any, path: Path) -> tuple[Any, bool]:
    """How pieces spell bytes, and whether decoding drops a leading space, from the stored decoder."""
    decoder = decoder if isinstance(decoder, dict) else {}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level", False
    if kinds == ["Metaspace"]:
        step = steps[0]
        prefix = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
        if step.get("replacement", SPACE_MARK) == SPACE_MARK:
            return "space_mark", prefix != "never"
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        strip = steps[3] if kinds[3:] else {"content": " ", "start": 0, "stop": 0}
        escapes = steps[0].get("pattern") == {"String": SPACE_MARK} and steps[0].get("content") == " "
        if escapes and strip["content"] == " " and strip["start"] in (0, 1) and strip["stop"] == 0:
            return "space_mark", strip["start"] == 1
    raise CheckpointError(
        f"{path}: a decoder of {kinds} is not supported: byte-level and SentencePiece BPE are"
    )


def _fingerprint(path: Path, settings: dict[str, Any], bos: int | None, ends: list[int]) -> str:
    digest = hashlib.sha256(path.read_bytes())
    keys = ("add_bos_token", "add_eos_token", "added_tokens_decoder")
    rest = [{key: settings.get(key) for key in keys}, bos, sorted(set(ends))]
    digest.update(json.dumps(rest, sort_keys=True).encode())
    return digest.hexdigest()
