"""Log-probabilities of an answer, for people; `jaxinfer.generation.records` has them as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from jaxinfer.generation import TokenLogprob
    from jaxinfer.models.model import Tokenizer

_BAR_WIDTH = 12


def logprob_table(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> Table:
    """Returns a table with one row a token: its probability under the model, and the alternatives'."""
    from rich.table import Table
    from rich.text import Text

    from jaxinfer.generation.records import spelling

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("TOKEN")
    table.add_column("LOGPROB", justify="right")
    table.add_column("PROBABILITY")
    if any(entry.top for entry in logprobs):
        table.add_column("MOST LIKELY")
    for entry in logprobs:
        probability = math.exp(entry.logprob)
        bar = "█" * round(probability * _BAR_WIDTH)
        top = "  ".join(f"{spelling(tokenizer, i)!r} {math.exp(value):.0%}" for i, value in entry.top)
        table.add_row(
            Text(repr(spelling(tokenizer, entry.token_id))),
            f"{entry.logprob:.3f}",
            f"[cyan]{bar:<{_BAR_WIDTH}}[/cyan] {probability:4.0%}",
            *([Text(top)] if entry.top else []),
        )
    return table
