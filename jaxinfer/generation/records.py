"""Log-probabilities of an answer as JSON values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxinfer.generation.rows import TokenLogprob
from jaxinfer.models.model import Tokenizer


def logprob_records(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Returns one JSON object a token; a log-probability of minus infinity is null."""
    return [
        {
            "token_id": entry.token_id,
            "token": spelling(tokenizer, entry.token_id),
            "logprob": _json_number(entry.logprob),
            "processed_logprob": _json_number(entry.processed_logprob),
            "top": [
                {"token_id": index, "token": spelling(tokenizer, index), "logprob": _json_number(value)}
                for index, value in entry.top
            ],
        }
        for entry in logprobs
    ]


def spelling(tokenizer: Tokenizer, token_id: int) -> str:
    """Returns a token as it is written, special ones too."""
    return tokenizer.decode([token_id], skip_special_tokens=False)


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
