"""Output records: one JSON object a line."""

from __future__ import annotations

import json
from typing import Any

from jaxinfer.batch.encode import Row
from jaxinfer.batch.request import BadRow
from jaxinfer.generation import Generation
from jaxinfer.generation.records import logprob_records
from jaxinfer.models.model import Tokenizer

# Characters that JSON leaves alone and that some readers take for the end of a line.
_LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


def answer_record(tokenizer: Tokenizer, row: Row, answer: Generation) -> str:
    """Returns the line of an answered row, without a newline."""
    sampling = row.options.sampling
    record: dict[str, Any] = {
        "id": row.request.id,
        "line": row.request.line,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop": answer.stop,
        "num_prompt_tokens": len(row.token_ids),
        "num_new_tokens": len(answer.token_ids),
        "token_ids": answer.token_ids,
        "seed": sampling.seed if sampling.temperature > 0 else None,
    }
    if answer.logprobs is not None:
        record["logprobs"] = logprob_records(tokenizer, answer.logprobs)
    return _line(record)


def error_record(bad: BadRow) -> str:
    """Returns the line of a row that cannot be answered, without a newline."""
    return _line({"id": bad.id, "line": bad.line, "error": bad.error})


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
