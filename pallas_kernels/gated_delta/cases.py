"""Inputs that every implementation of the gated delta rule must get right; one list for all backends."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

CHUNK = 64  # the longest chunk of any form; the cases stand around it, its half and its multiples


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; `arrays` draws its inputs. Ranges are those of uniform draws, decays as e^log_decay."""

    name: str
    q_len: int
    batch: int = 2
    num_key_heads: int = 2
    num_value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 8
    dtype: str = "float32"  # of query, key, value and beta
    decay: tuple[float, float] = (0.2, 1.0)
    rare_decay: float | None = None  # the decay of every eighth column, None: like the others
    beta: tuple[float, float] = (0.0, 1.0)
    repeat_key: bool = False  # the first column's key in every column
    value_scale: float = 1.0
    lengths: tuple[int, ...] | None = None
    checkpoint_columns: tuple[tuple[int, ...], ...] | None = None

    def arrays(self, seed: int = 0) -> dict[str, Any]:
        """Returns the arguments of `gated_delta_chunk` as numpy arrays, by name; padding columns hold NaN."""
        rng = np.random.default_rng(seed)
        key_shape = (self.batch, self.q_len, self.num_key_heads, self.key_dim)
        gates = (self.batch, self.q_len, self.num_value_heads)
        query, key = rng.standard_normal(key_shape), rng.standard_normal(key_shape)
        if self.repeat_key:
            key = np.broadcast_to(key[:, :1], key_shape)
        value = self.value_scale * rng.standard_normal((*gates, self.value_dim))
        decay = rng.uniform(*self.decay, gates)
        if self.rare_decay is not None:
            decay[:, ::8] = self.rare_decay
        beta = rng.uniform(*self.beta, gates)
        state = rng.standard_normal((self.batch, self.num_value_heads, self.key_dim, self.value_dim))
        dtype = ml_dtypes.bfloat16 if self.dtype == "bfloat16" else np.float32
        arrays: dict[str, Any] = {
            name: x.astype(dtype) for name, x in zip(_INPUTS, (query, key, value, beta), strict=True)
        }
        with np.errstate(divide="ignore"):  # a decay of 0 is a log decay of -inf
            arrays["log_decay"] = np.log(decay).astype(np.float32)
        arrays["initial_state"] = (self.value_scale * state).astype(np.float32)
        arrays["lengths"] = arrays["checkpoint_columns"] = None
        if self.lengths is not None:
            arrays["lengths"] = np.asarray(self.lengths, np.int32)
            for row, length in enumerate(self.lengths):
                for name in (*_INPUTS, "log_decay"):
                    arrays[name][row, length:] = np.nan
        if self.checkpoint_columns is not None:
            arrays["checkpoint_columns"] = np.asarray(self.checkpoint_columns, np.int32)
        return arrays


_INPUTS = ("query", "key", "value", "beta")

CASES = (
    Case("one_column", 1),
    Case("one_column_of_one_row_padded", 1, lengths=(1, 0), checkpoint_columns=((0, 1), (1, -1))),
    Case("few_columns", 5),
    Case("one_short_of_half_a_chunk", CHUNK // 2 - 1),
    Case("half_a_chunk", CHUNK // 2),
    Case("one_past_half_a_chunk", CHUNK // 2 + 1),
    Case("three_halves_and_two", 3 * CHUNK // 2 + 2),
    Case("one_short_of_a_chunk", CHUNK - 1),
    Case("one_chunk", CHUNK),
    Case("one_past_a_chunk", CHUNK + 1),
    Case("three_chunks_and_two", 3 * CHUNK + 2, checkpoint_columns=((0, 64, 65, 194), (-1, 1, 127, 193))),
    Case("one_value_head_a_key_head", CHUNK + 3, num_key_heads=3, num_value_heads=3),
    Case("four_value_heads_a_key_head", CHUNK + 3, num_key_heads=1),
    Case("wide_heads", CHUNK + 3, batch=1, num_value_heads=2, key_dim=128, value_dim=128),
    Case("padded_rows", 80, batch=3, lengths=(80, 70, 0), checkpoint_columns=((77, 80), (70, 75), (0, 3))),
    Case("no_decay", 2 * CHUNK, decay=(1.0, 1.0)),
    Case("extreme_decay", CHUNK, decay=(1e-12, 1e-12)),
    Case("extreme_decay_now_and_then", 2 * CHUNK, decay=(0.9, 1.0), rare_decay=1e-12),
    Case("total_decay", CHUNK + 8, decay=(0.9, 1.0), rare_decay=0.0),
    Case("one_key_written_over_and_over", 2 * CHUNK, decay=(1.0, 1.0), beta=(1.0, 1.0), repeat_key=True),
    Case("one_key_almost_written_over", 2 * CHUNK, decay=(0.99, 1.0), beta=(0.9, 1.0), repeat_key=True),
    Case("bfloat16", CHUNK + 9, dtype="bfloat16", checkpoint_columns=((70,), (3,))),
    Case("bfloat16_large_readouts", CHUNK + 9, dtype="bfloat16", value_scale=1e5),
)
