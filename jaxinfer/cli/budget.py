"""What a state of a model costs: by kind of layer, with and without dropping rows behind the window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.sizes import format_bytes

if TYPE_CHECKING:
    from jaxinfer.config import ModelConfig

_BAR_WIDTH = 24
_REST = "lengths"


def budget_facts(
    config: ModelConfig, *, kv_window: bool | None, context: int | None, budget_bytes: int | None
) -> dict[str, Any]:
    """Returns the bytes of a state of one sequence, from the shapes that `init_state` allocates.

    Args:
      kv_window: which of the two is meant; None: as the environment variable JAXINFER_KV_WINDOW says.
      context: positions; None: the trained length.
      budget_bytes: what a state may cost, for the longest context; None: not asked.

    Raises:
      ValueError: a context below 1, or a budget that not even one position fits in.
    """
    from jaxinfer.generation.generate import kv_dtype
    from jaxinfer.state import KvResidency, KvWindowPolicy

    policy = KvWindowPolicy.from_env() if kv_window is None else KvWindowPolicy(enabled=kv_window)
    capacity = config.max_positions if context is None else context
    dtype = kv_dtype(config)
    found: dict[str, Any] = {
        "kv_window": policy.enabled,
        "kv_dtype": dtype,
        "kv_bytes_per_token": KvResidency.from_config(config, policy, dtype=dtype).resident_bytes(1),
        "context": capacity,
        "budget_bytes": budget_bytes,
    }
    for name, each in (("keep_all", KvWindowPolicy.off()), ("evict", KvWindowPolicy.on())):
        residency = KvResidency.from_config(config, each, dtype=dtype)
        found[name] = {
            "allocated_bytes": residency.allocated_bytes(capacity),
            "kinds": [
                {
                    "kind": _REST if part.kind is None else part.kind.value,
                    "num_layers": part.num_layers,
                    "state_bytes": part.state_bytes,
                }
                for part in residency.by_layer_kind(capacity)
            ],
            "longest_context": None if budget_bytes is None else residency.max_capacity(budget_bytes),
        }
    return found


def budget_report(budget: dict[str, Any], max_positions: int) -> Iterator[Any]:
    """Yields rich renderables: a bar a kind of layer, what eviction saves, the longest context."""
    chosen = "evict" if budget["kv_window"] else "keep_all"
    total = budget[chosen]["allocated_bytes"]
    beyond = ", beyond the trained length" if budget["context"] > max_positions else ""
    title = f"State of {budget['context']:,} positions in {budget['kv_dtype']}{beyond}"
    rows = []
    for part in budget[chosen]["kinds"]:
        if part["num_layers"]:  # the rest is a few bytes of lengths
            label = f"{part['num_layers']} {part['kind'].replace('_', ' ')}"
            rows.append((label, part["state_bytes"], f"{part['state_bytes'] / total:4.0%}"))
    yield from _bars(title, [*rows, ("together", total, "")], total)
    keep, evict = budget["keep_all"], budget["evict"]
    if keep["allocated_bytes"] != evict["allocated_bytes"]:
        saved = 1 - evict["allocated_bytes"] / keep["allocated_bytes"]
        yield ""
        yield from _bars(
            "Rows behind the window of sliding layers",
            [
                ("kept", keep["allocated_bytes"], ""),
                ("dropped (--kv-window)", evict["allocated_bytes"], f"saves {saved:.0%}"),
            ],
            keep["allocated_bytes"],
        )
    if budget["budget_bytes"] is not None:
        lengths = {
            "rows kept": keep["longest_context"],
            "rows dropped (--kv-window)": evict["longest_context"],
        }
        if keep["longest_context"] == evict["longest_context"]:
            lengths = {"positions": keep["longest_context"]}
        yield ""
        yield from _bars(
            f"Longest context in {format_bytes(budget['budget_bytes'])} (weights not counted)",
            [
                (label, length, "the trained length" if length == max_positions else "")
                for label, length in lengths.items()
            ],
            max_positions,
            shown=lambda length: f"{length:,}",
        )


def _bars(
    title: str,
    rows: list[tuple[str, int, str]],
    whole: int,
    shown: Callable[[int], str] = format_bytes,
) -> Iterator[Any]:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for label, count, remark in rows:
        table.add_row(label, shown(count), f"[green]{_bar(count / whole)}[/green]", remark)
    yield Text(title, style="bold")
    yield table


def _bar(share: float) -> str:
    """Returns a bar in eighths of a character; something that is not nothing is at least one eighth."""
    eighths = max(round(share * _BAR_WIDTH * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
