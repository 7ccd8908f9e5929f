"""Named cases of span attention that every implementation runs: tests here, scripts on a GPU or TPU.

Each case builds its arrays with numpy from a seed. Key and value rows that no span of their batch row
holds are filled with garbage (NaN, infinities, large numbers), queries without a span with NaN, so
every case checks that neither is read into a result.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_Spans = Callable[["Case"], tuple[np.ndarray, np.ndarray]]


class Inputs(NamedTuple):
    """Arguments of one call, numpy: float32 arrays, int32 spans."""

    query: np.ndarray  # [B, T, N, H]
    key: np.ndarray  # [B, K, S, H]
    value: np.ndarray  # [B, K, S, H]
    span_lo: np.ndarray  # [B, T]
    span_hi: np.ndarray  # [B, T]
    sinks: np.ndarray | None  # [N]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: sizes, spans and options. Sizes are in elements."""

    name: str
    spans: _Spans
    batch: int = 1
    q_len: int = 200
    kv_len: int = 200
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    logits_soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def softmax_scale(self) -> float:
        """Of the head_dim as given, not of what a kernel pads it to."""
        return self.head_dim**-0.5

    @property
    def options(self) -> dict:
        """Keyword arguments of the call that are plain numbers."""
        return {"softmax_scale": self.softmax_scale, "logits_soft_cap": self.logits_soft_cap}

    def inputs(self) -> Inputs:
        """Returns the arguments, the same in every run."""
        draw = np.random.default_rng(zlib.crc32(self.name.encode()))
        lo, hi = (x.astype(np.int32) for x in self.spans(self))
        kv_shape = (self.batch, self.num_kv_heads, self.kv_len, self.head_dim)
        query = draw.normal(size=(self.batch, self.q_len, self.num_q_heads, self.head_dim))
        key, value = draw.normal(size=kv_shape), draw.normal(size=kv_shape)
        rows = np.arange(self.kv_len)
        mask = (lo[..., None] <= rows) & (rows <= hi[..., None])
        query[~mask.any(axis=2)] = np.nan
        for array, garbage in ((key, (np.nan, np.inf, -1e30)), (value, (np.inf, np.nan, 1e30))):
            for b in range(self.batch):
                unread = ~mask[b].any(axis=0)
                array[b][:, unread] = np.resize(garbage, unread.sum())[:, None]
        sinks = draw.normal(size=self.num_q_heads).astype(np.float32) if self.has_sinks else None
        query, key, value = (x.astype(np.float32) for x in (query, key, value))
        return Inputs(query, key, value, lo, hi, sinks)


def _per_row(lo, hi, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The same spans [T] for every batch row."""
    shape = (case.batch, case.q_len)
    return np.broadcast_to(lo, shape), np.broadcast_to(hi, shape)


def _causal(offset: int = 0, window: int | None = None) -> _Spans:
    """Queries at rows offset.. read themselves and what lies before, or the last `window` rows of it."""

    def spans(case: Case):
        rows = offset + np.arange(case.q_len)
        lo = np.zeros_like(rows) if window is None else np.maximum(rows - window + 1, 0)
        return _per_row(lo, rows, case)

    return spans


def _image_runs(case: Case):
    """Causal text with three runs whose columns also read forward to the end of their run."""
    hi = np.arange(case.q_len)
    for start, end in ((3, 40), (41, 90), (case.q_len - 60, case.q_len)):
        hi[start:end] = end - 1
    return _per_row(np.maximum(np.arange(case.q_len) - 99, 0), hi, case)


def _packed(starts: tuple[int, ...]) -> _Spans:
    """Documents end to end, causal within each."""

    def spans(case: Case):
        rows = np.arange(case.q_len)
        lo = np.array(starts)[np.searchsorted(starts, rows, side="right") - 1]
        return _per_row(lo, rows, case)

    return spans


def _shuffled_documents(case: Case):
    """Columns of three documents in any order, each document in its own rows with unread rows between."""
    draw = np.random.default_rng(5)
    starts = np.array([10, case.kv_len // 3 + 20, case.kv_len - 120])
    lo = draw.choice(starts, case.q_len)
    return _per_row(lo, lo + draw.integers(0, 70, case.q_len), case)


def _some_empty(case: Case):
    """Every third query reads nothing, in several ways of saying so."""
    rows = np.arange(case.q_len)
    lo, hi = np.zeros_like(rows), rows.copy()
    lo[::3], hi[::3] = rows[::3] + 1, rows[::3]
    lo[::6], hi[::6] = 0, -1
    lo[3::12], hi[3::12] = case.kv_len, case.kv_len + 5
    return _per_row(lo, hi, case)


def _all_empty(case: Case):
    return _per_row(np.full(case.q_len, 1), np.full(case.q_len, 0), case)


def _ragged(lengths: tuple[int, ...]) -> _Spans:
    """Batch rows of different lengths, padded on the right with queries that read nothing."""

    def spans(case: Case):
        rows = np.broadcast_to(np.arange(case.q_len), (case.batch, case.q_len))
        real = rows < np.array(lengths)[:, None]
        return np.zeros_like(rows), np.where(real, rows, -1)

    return spans


def _decode(lengths: tuple[int, ...], window: int | None = None) -> _Spans:
    """The last columns of caches filled to `lengths`."""

    def spans(case: Case):
        hi = np.array(lengths)[:, None] - case.q_len + np.arange(case.q_len)
        lo = np.zeros_like(hi) if window is None else np.maximum(hi - window + 1, 0)
        return lo, hi

    return spans


def _out_of_range(case: Case):
    """Spans that start before row 0 and end after the last row."""
    rows = np.arange(case.q_len)
    return _per_row(rows - 50, rows + 60, case)


def _single_rows(case: Case):
    rows = (np.arange(case.q_len) * 7) % case.kv_len
    return _per_row(rows, rows, case)


CASES: tuple[Case, ...] = (
    Case("causal", _causal()),
    Case("causal chunk in a cache", _causal(offset=333), q_len=150, kv_len=700),
    Case("window", _causal(window=37), q_len=300, kv_len=300),
    Case("window chunk far into a cache", _causal(offset=901, window=64), q_len=70, kv_len=1200),
    Case("image runs", _image_runs, q_len=260, kv_len=260),
    Case("packed documents", _packed((0, 70, 75, 190)), q_len=300, kv_len=300),
    Case("shuffled documents with unread rows between", _shuffled_documents, kv_len=800),
    Case("empty rows", _some_empty),
    Case("nothing to read", _all_empty, q_len=9, kv_len=40),
    Case("ragged rows", _ragged((150, 1, 0, 67)), batch=4, q_len=150, kv_len=330),
    Case("spans past both ends", _out_of_range, q_len=130, kv_len=150),
    Case("one row each", _single_rows, kv_len=333),
    Case("fewer rows than a block", _causal(), q_len=20, kv_len=20),
    Case("soft cap", _causal(), logits_soft_cap=0.7),
    Case("sinks", _some_empty, has_sinks=True),
    Case("soft cap and sinks", _causal(window=90), logits_soft_cap=1.5, has_sinks=True),
    Case("decode", _decode((64,)), q_len=1, kv_len=1000, num_q_heads=9, num_kv_heads=3),
    Case("decode ragged rows", _decode((700, 3, 256, 257)), batch=4, q_len=1, kv_len=700),
    Case("decode in a window", _decode((613, 100), window=130), batch=2, q_len=1, kv_len=650),
    Case("decode a few columns", _decode((500, 21)), batch=2, q_len=5, kv_len=513, has_sinks=True),
    *(
        Case(
            f"head_dim {head_dim}, {ratio} query heads a key head",
            _causal(offset=13),
            q_len=140,
            kv_len=170,
            num_q_heads=8,
            num_kv_heads=8 // ratio,
            head_dim=head_dim,
        )
        for head_dim in (64, 80, 128, 256)
        for ratio in (1, 4, 8)
    ),
)
