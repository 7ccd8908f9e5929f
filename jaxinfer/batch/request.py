"""Input rows: one JSON object a line, checked field by field.

A line that is no good becomes a `BadRow`, never an exception: one bad row in a million is no reason to stop.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxinfer.batch.lines import MAX_LINE_BYTES
from jaxinfer.generation.rows import GREEDY
from jaxinfer.sampling import Sampling

RowId = str | int

MAX_LOGPROBS = 128  # alternatives a token; more would be computed for every row of the batch
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
FIELDS = ("id", "prompt", "messages", "images", "max_new_tokens", *_SAMPLING, "seed", "stop", "logprobs")
_SEED_BITS = 53  # what every JSON reader keeps
_LONGEST_ERROR = 300


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What a row gets where it does not say.

    Attributes:
      max_new_tokens: None: 256, or what the model's positions leave.
      sampling: its seed is the job's, from which each row's own is made; None: 0.
      stop: strings that end a row.
      logprobs: alternatives to report a token; None: no log-probabilities.
    """

    max_new_tokens: int | None = None
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        fields = {"max_new_tokens": self.max_new_tokens, "stop": list(self.stop), "logprobs": self.logprobs}
        try:
            _options({name: value for name, value in fields.items() if value is not None}, self)
        except _RowError as error:
            raise ValueError(str(error)) from None


@dataclasses.dataclass(frozen=True)
class Request:
    """A row that is well-formed; one of `prompt` and `messages` is not None, `images` are paths."""

    id: RowId
    line: int
    prompt: str | None
    messages: list[dict[str, Any]] | None
    max_new_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    logprobs: int | None
    images: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class BadRow:
    """A row that cannot be answered, and one sentence that says why."""

    id: RowId
    line: int
    error: str


class _RowError(ValueError):
    pass


def parse_row(line: bytes, number: int, defaults: Defaults) -> Request | BadRow:
    """Returns what a line asks for; `number` counts lines from 1 and is the id of a row that has none."""
    row_id: RowId = number
    try:
        fields = _json_object(line, number)
        row_id = _row_id(fields, number)
        unknown = sorted(fields.keys() - set(FIELDS))
        if unknown:
            raise _RowError(f"unknown field {unknown[0]!r}; a row may have {', '.join(FIELDS)}")
        prompt, messages = _what_to_answer(fields)
        max_new_tokens, stop, logprobs = _options(fields, defaults)
        sampling = _sampling(fields, row_id, defaults)
        images = _images(fields)
    except _RowError as error:
        text = " ".join(str(error).split())
        return BadRow(
            row_id, number, text if len(text) <= _LONGEST_ERROR else f"{text[: _LONGEST_ERROR - 3]}..."
        )
    return Request(row_id, number, prompt, messages, max_new_tokens, sampling, stop, logprobs, images)


def _json_object(line: bytes, number: int) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise _RowError(f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise _RowError(f"the line is not UTF-8 text: {error.reason} at byte {error.start}") from None
    if not text.strip():
        raise _RowError("the line is blank")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        if "\\u" in text:  # half of a surrogate pair can only be written as an escape
            json.dumps(value, ensure_ascii=False).encode()
    except _RowError:
        raise
    except json.JSONDecodeError as error:
        raise _RowError(f"the line is not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeEncodeError:
        raise _RowError("the line holds half of a surrogate pair, which is no text") from None
    except RecursionError:
        raise _RowError("the line is nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise _RowError(f"the line is not JSON that can be read: {error}") from None
    if not isinstance(value, dict):
        raise _RowError(f"the line must be a JSON object; got {_brief(value)}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise _RowError(f"field {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return value


def _no_constant(name: str) -> NoReturn:
    raise _RowError(f"the line is not JSON: {name} is no JSON number")


def _row_id(fields: Mapping[str, Any], number: int) -> RowId:
    value = fields.get("id", number)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _RowError(f"id must be a string or an integer; got {_brief(value)}")
    return value


def _what_to_answer(fields: Mapping[str, Any]) -> tuple[str | None, list[dict[str, Any]] | None]:
    if ("prompt" in fields) == ("messages" in fields):
        raise _RowError(f"a row needs prompt or messages; got {'both' if 'prompt' in fields else 'neither'}")
    if "prompt" in fields:
        if not isinstance(fields["prompt"], str):
            raise _RowError(f"prompt must be a string; got {_brief(fields['prompt'])}")
        return fields["prompt"], None
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise _RowError(
            f"messages must be a list of objects with a role, not an empty one; got {_brief(messages)}"
        )
    return None, messages


def _images(fields: Mapping[str, Any]) -> tuple[str, ...]:
    images = fields.get("images", [])
    if not isinstance(images, list) or not all(isinstance(path, str) and path for path in images):
        raise _RowError(f"images must be a list of paths; got {_brief(images)}")
    return tuple(images)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _options(fields: Mapping[str, Any], defaults: Defaults) -> tuple[int | None, tuple[str, ...], int | None]:
    """Returns (max_new_tokens, stop, logprobs)."""
    max_new_tokens = fields.get("max_new_tokens", defaults.max_new_tokens)
    if "max_new_tokens" in fields and (not _is_int(max_new_tokens) or max_new_tokens < 1):
        raise _RowError(f"max_new_tokens must be an integer of at least 1; got {_brief(max_new_tokens)}")
    stop = fields.get("stop", list(defaults.stop))
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise _RowError(f"stop must be a string or a list of strings, none of them empty; got {_brief(stop)}")
    logprobs = fields.get("logprobs", defaults.logprobs)
    if logprobs is not None and (not _is_int(logprobs) or not 0 <= logprobs <= MAX_LOGPROBS):
        raise _RowError(f"logprobs must be null or an integer in 0..{MAX_LOGPROBS}; got {_brief(logprobs)}")
    return max_new_tokens, tuple(stops), logprobs


def _sampling(fields: Mapping[str, Any], row_id: RowId, defaults: Defaults) -> Sampling:
    given = {name: fields[name] for name in (*_SAMPLING, "seed") if name in fields}
    if given.get("seed") is None:
        given["seed"] = row_seed(defaults.sampling.seed or 0, row_id)
    try:
        return dataclasses.replace(defaults.sampling, **given)
    except ValueError as error:
        raise _RowError(re.sub(r"^Sampling\((\w+)=\.\.\.\)", r"\1", str(error))) from None


def row_seed(job_seed: int, row_id: RowId) -> int:
    """Returns the seed of a row that brings none: of the job's seed and the row's id alone, so that neither
    the row's place nor its batch mates matter, and equal prompts are answered differently."""
    digest = hashlib.blake2b(json.dumps([job_seed, row_id]).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> (64 - _SEED_BITS)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _brief(value: object) -> str:
    """Returns a value as JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
