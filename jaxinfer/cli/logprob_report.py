"""Log-probabilities of an answer, for people and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from jaxinfer.generation import TokenLogprob
    from jaxinfer.models.model import Tokenizer

_BAR_WIDTH = 12


def logprob_records(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Returns one JSON object a token; a log-probability of minus infinity is null."""
    return [
        {
            "token_id": entry.token_id,
            "token": _spelling(tokenizer, entry.token_id),
            "logprob": _json_number(entry.logprob),
            "processed_logprob": _json_number(entry.processed_logprob),
            "top": [
                {"token_id": index, "token": _spelling(tokenizer, index), "logprob": _json_number(value)}
                for index, value in entry.top
            ],
        }
        for entry in logprobs
    ]


def logprob_table(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> Table:
    """Returns a table with one row a token: its probability under the model, and the alternatives'."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("TOKEN")
    table.add_column("LOGPROB", justify="right")
    table.add_column("PROBABILITY")
    if any(entry.top for entry in logprobs):
        table.add_column("MOST LIKELY")
    for entry in logprobs:
        probability = math.exp(entry.logprob)
        bar = "█" * round(probability * _BAR_WIDTH)
        top = "  ".join(f"{_spelling(tokenizer, i)!r} {math.exp(value):.0%}" for i, value in entry.top)
        table.add_row(
            Text(repr(_spelling(tokenizer, entry.token_id))),
            f"{entry.logprob:.3f}",
            f"[cyan]{bar:<{_BAR_WIDTH}}[/cyan] {probability:4.0%}",
            *([Text(top)] if entry.top else []),
        )
    return table


def _spelling(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
