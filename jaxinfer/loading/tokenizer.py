"""Text to token ids and back, the same for every source of the vocabulary.

A `Tokenizer` never changes after it is built. Decoding goes through bytes: every id stands for fixed
bytes, an answer is their concatenation read as UTF-8, with U+FFFD for bytes that are not UTF-8. So a
stream can be decoded id by id (`StreamDecoder`) with exactly the text that `decode` gives.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import tokenizers

SPACE_MARK = "\u2581"
_BREAK = "\ufdd0"  # a noncharacter: no text holds one
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Backend(Protocol):
    """What a `Tokenizer` needs of a `tokenizers.Tokenizer`."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> tokenizers.Encoding: ...
    def get_added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]: ...
    def id_to_token(self, token_id: int, /) -> str | None: ...
    def token_to_id(self, token: str, /) -> int | None: ...


class Tokenizer:
    """An immutable tokenizer.

    Attributes:
        vocab_size: every id is below this; added tokens are counted.
        bos_token_id: the id that begins a text, None when the vocabulary has none.
        eos_token_ids: every id that ends an answer, ascending.
        special_ids: control tokens, which `decode` leaves out by default.
        fingerprint: hex digest of everything that decides ids and texts.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        piece_encoding: Literal["byte_level", "space_mark"],
        strip_leading_space: bool,
        vocab_size: int,
        bos_token_id: int | None,
        eos_token_ids: Iterable[int],
        fingerprint: str,
    ):
        """`backend` is taken over: the caller must not change it afterwards.

        `piece_encoding` says how a vocabulary entry spells its bytes: "byte_level", one printable
        character a byte (GPT-2); "space_mark", plain text with U+2581 for a space and <0xNN> for a byte
        (SentencePiece). `strip_leading_space`: `decode` drops the one space that encoding put in front.
        """
        self._backend = backend
        self._piece_encoding = piece_encoding
        self._strip_leading_space = strip_leading_space
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_ids: tuple[int, ...] = tuple(sorted(set(eos_token_ids)))
        added = backend.get_added_tokens_decoder()
        self._added_text: dict[int, str] = {index: token.content for index, token in added.items()}
        self.special_ids: frozenset[int] = frozenset(index for index, token in added.items() if token.special)
        self._control_heads = {text[0] for index in self.special_ids if (text := self._added_text[index])}
        self.fingerprint = fingerprint
        for index in (*self.eos_token_ids, *(() if bos_token_id is None else (bos_token_id,))):
            self._check_id(index)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; control tokens spelled out in it become their ids.

        With `add_special_tokens` the ids that the tokenizer puts around a raw text are there too (often
        one BOS). A rendered chat already holds its own: use `encode_rendered`.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered chat template, which holds the BOS that it defines: none is added.

        What `guard` was applied to before it was rendered holds no control token.
        """
        parts = text.split(_BREAK)
        return [index for part in parts for index in self.encode(part, add_special_tokens=False)]

    def guard(self, text: str) -> str:
        """Returns `text` such that `encode_rendered` reads all of it as text: what spells a control token
        has a break inside, a noncharacter that is never encoded.

        Somebody's words in a conversation must not end their turn or begin another's. `text` comes back as
        it is where it spells none; and where the tokenizer would read something else around a break (one
        that puts a space in front of whatever it encodes), or finds a control token by another spelling:
        there control tokens are read in any text, as transformers does.

        Raises:
          ValueError: `text` holds U+FDD0, the break.
        """
        if _BREAK in text:
            raise ValueError("the text holds U+FDD0, a noncharacter that stands for no text; remove it")
        if not any(head in text for head in self._control_heads):
            return text
        guarded = text
        while found := self.special_ids.intersection(ids := self.encode_rendered(guarded)):
            broken = guarded
            for token in sorted((self._added_text[index] for index in found), key=len, reverse=True):
                if len(token) < 2:
                    return text
                broken = broken.replace(token, f"{token[:1]}{_BREAK}{token[1:]}")
            if broken == guarded:
                return text
            guarded = broken
        return guarded if self.decode(ids, skip_special_tokens=False) == text else text

    def unguard(self, text: str) -> str:
        """Returns a text without the breaks of `guard`."""
        return text.replace(_BREAK, "")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; ValueError for an id that is not in the vocabulary."""
        decoder = self.stream_decoder(skip_special_tokens=skip_special_tokens)
        return decoder.push(token_ids) + decoder.flush()

    def stream_decoder(self, *, skip_special_tokens: bool = True) -> StreamDecoder:
        """A decoder that takes ids as they come."""
        return StreamDecoder(self, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id stands for; an added or control token's are its spelling."""
        self._check_id(token_id)
        if token_id in self._added_text:
            text = self._added_text[token_id]
            special = token_id in self.special_ids
            return (
                text if special else text.replace(SPACE_MARK, " ") if self._marks_spaces else text
            ).encode()
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""  # a hole in the vocabulary: the id exists, nothing encodes to it
        if self._marks_spaces:
            byte = _BYTE_PIECE.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE_MARK, " ").encode()
        try:
            return bytes(BYTE_OF_CHARACTER[character] for character in piece)
        except KeyError:
            return piece.encode()

    def token_id(self, token: str) -> int | None:
        """The id of a vocabulary entry by its exact spelling, None when there is none."""
        return self._backend.token_to_id(token)

    @property
    def strips_leading_space(self) -> bool:
        """True when `decode` drops one leading space."""
        return self._strip_leading_space

    @property
    def _marks_spaces(self) -> bool:
        return self._piece_encoding == "space_mark"

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")


class StreamDecoder:
    """Decodes ids as they come and never gives out part of a character.

    The texts of all `push` calls and of the final `flush` join to what `Tokenizer.decode` gives.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.strips_leading_space

    def push(self, token_ids: int | Iterable[int]) -> str:
        """The text that these ids complete, "" when they end inside a character."""
        ids = (token_ids,) if isinstance(token_ids, int) else token_ids
        data = b"".join(self._tokenizer.token_bytes(int(i)) for i in ids if int(i) not in self._skipped)
        return self._without_first_space(self._utf8.decode(data))

    def flush(self) -> str:
        """What is left: U+FFFD for a character that was never finished, else ""."""
        return self._without_first_space(self._utf8.decode(b"", final=True))

    def _without_first_space(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else from U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = _byte_characters()
