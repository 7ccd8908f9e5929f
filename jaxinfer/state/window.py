"""How many key/value rows a sliding layer keeps: the eviction window and the policy that turns it on.

Two numbers that must not be confused: *positions* are the tokens a state has consumed (rope, resuming
and truncation count in these), *rows* are what is still resident (attention extent and bytes). Resident
rows are contiguous: row i holds position `positions - rows + i`. Eviction happens after the layer's
attention, so a step's own rows are always there to be read.
"""

from __future__ import annotations

import dataclasses
import operator
import os
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxinfer.config import ModelConfig

KV_WINDOW_ENV = "JAXINFER_KV_WINDOW"
_ON_VALUES = frozenset({"1", "on", "true", "yes"})

Positions = TypeVar("Positions", int, jax.Array)


@dataclasses.dataclass(frozen=True)
class KvWindow:
    """The rows of one sliding layer: at least the attention window, at most `slack` more.

    Evicting row by row would move the buffer at every step, so rows pile up to `window + slack` and the
    next one drops `slack + 1` at once. For window 3 and slack 2::

        positions    0 1 2 3 4 5 6 7 8 9 10 11 12
        rows         0 1 2 3 4 5 3 4 5 3  4  5  3

    Attributes:
        window: keys a query may read, itself included: the layer's attention window exactly; at least 1.
        slack: rows kept beyond the window before an eviction; 0 evicts one row at every step.
    """

    window: int
    slack: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", _as_count(self.window, "KvWindow(window=...)", least=1))
        object.__setattr__(self, "slack", _as_count(self.slack, "KvWindow(slack=...)", least=0))

    @classmethod
    def with_default_slack(cls, window: int | None) -> KvWindow | None:
        """Returns the window with half of itself as slack, at least 1; None for a window of None or 0.

        Raises:
            ValueError: `window` is negative or not an int.
        """
        if window is None:
            return None
        width = _as_count(window, "KvWindow.with_default_slack(window=...)", least=0)
        return cls(width, max(1, width // 2)) if width else None

    @property
    def max_rows(self) -> int:
        """The most rows that stay resident between two steps."""
        return self.window + self.slack

    def rows_after(self, positions: Positions) -> Positions:
        """Returns how many rows are resident after `positions` tokens, appended one at a time.

        `p` while `p <= window + slack`, then `window + ((p - window - slack - 1) mod (slack + 1))`, which
        is `p` less `slack + 1` for every eviction so far. Always within `min(p, window)` and
        `min(p, window + slack)`. An append of several tokens at once may have fewer rows to keep: then
        the resident rows are `min(rows_after(positions), rows held before the eviction)`.

        Args:
            positions: tokens consumed, at least 0: an int, or an integer array of any shape, which may
                be traced.

        Returns:
            Rows: an int for an int; for an array an array of its shape, int32 for int32.

        Raises:
            ValueError: a negative int, or an array that does not hold integers.
        """
        if isinstance(positions, int | np.integer):
            count = _as_count(positions, "KvWindow.rows_after(positions=...)", least=0)
            return count - (self.slack + 1) * max(0, (count - self.window) // (self.slack + 1))
        counts = jnp.asarray(positions)
        if not jnp.issubdtype(counts.dtype, jnp.integer):
            raise ValueError(
                "KvWindow.rows_after(positions=...) must be an int or an int32 array; "
                f"got {counts.dtype} {counts.shape}"
            )
        evictions = jnp.maximum((counts - self.window) // (self.slack + 1), 0)
        return counts - (self.slack + 1) * evictions


@dataclasses.dataclass(frozen=True)
class KvWindowPolicy:
    """Whether sliding layers evict rows behind their window. A value: one process may hold both kinds.

    Off keeps every row of every layer; on keeps `KvWindow.max_rows` of a sliding layer. Outputs are the
    same either way; bytes and how far back a state can be truncated are not.
    """

    enabled: bool

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):
            raise ValueError(
                f"KvWindowPolicy(enabled=...) must be a bool; got {self.enabled!r}; "
                "use KvWindowPolicy.off(), .on() or .from_env()"
            )

    @classmethod
    def off(cls) -> KvWindowPolicy:
        """Returns the policy under which every layer keeps all rows (the default)."""
        return cls(enabled=False)

    @classmethod
    def on(cls) -> KvWindowPolicy:
        """Returns the policy under which sliding layers evict."""
        return cls(enabled=True)

    @classmethod
    def from_env(cls) -> KvWindowPolicy:
        """Returns the policy that the environment variable `JAXINFER_KV_WINDOW` names, as it is now.

        On for exactly `1`, `on`, `true` or `yes`: case-sensitive and untrimmed. Off for anything else.
        Read it once, when a model is loaded, and carry the value.
        """
        return cls(enabled=os.environ.get(KV_WINDOW_ENV) in _ON_VALUES)

    def window_for(self, attention_window: int | None) -> KvWindow | None:
        """Returns the eviction window of a layer that attends over `attention_window` keys.

        Args:
            attention_window: keys a query may read; None or 0 for a layer that reads all of them.

        Returns:
            None where the layer keeps every row: the policy is off, or the layer has no window.

        Raises:
            ValueError: `attention_window` is negative or not an int.
        """
        window = KvWindow.with_default_slack(attention_window)
        return window if self.enabled else None

    def layer_window(self, config: ModelConfig, layer_index: int) -> KvWindow | None:
        """Returns the eviction window of layer `layer_index`, None where the layer keeps every row.

        The one expression that decides it: decoder, prefill and budget all ask here.

        Raises:
            ValueError: the model has no such layer.
        """
        if not 0 <= layer_index < len(config.layers):
            raise ValueError(
                f"KvWindowPolicy.layer_window(layer_index=...) must be in 0..{len(config.layers) - 1}; "
                f"got {layer_index}"
            )
        return self.window_for(config.layers[layer_index].window)


def _as_count(value: object, name: str, *, least: int) -> int:
    """Returns `value` as a Python int of at least `least`; `name` is the argument in call form."""
    try:
        count = least - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = least - 1
    if count < least:
        raise ValueError(f"{name} must be an int of at least {least}; got {value!r}")
    return count
