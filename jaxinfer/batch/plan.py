"""Which rows share a batch: like with like, within a memory limit; a function of the rows alone.

A batch's answers may depend on its shape (float rounding), so a plan must come out the same whenever it is
made. Shapes are few: capacities are powers of two, batches too (and the largest size asked for), and a batch
that is not full is padded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxinfer.batch.encode import Row
from jaxinfer.generation import kv_dtype
from jaxinfer.generation.buckets import bucketed_capacity
from jaxinfer.models import Model
from jaxinfer.state import KvResidency

DEFAULT_BATCH_SIZE = 16
_MOST_ROWS = 256  # in a batch that only memory limits
_BATCHES_A_WINDOW = 16  # sorting more than these gains little, and they wait for one another


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows that are answered together.

    Attributes:
      members: their places in the window's list of rows.
      num_rows: rows to allocate; those beyond the members are padding.
      capacity: positions to allocate a row.
    """

    members: tuple[int, ...]
    num_rows: int
    capacity: int


class BatchPlanner:
    """Plans batches of one model.

    Args:
      batch_size: the most rows of a batch; None: 16, or what the memory allows.
      memory_bytes: what a batch's state may cost, to the byte as it is allocated; None: no limit. Weights
        and the working memory of a step are not counted.

    Raises:
      ValueError: a batch size below 1, or a limit that not even a row of one position fits in.
    """

    def __init__(self, model: Model, *, batch_size: int | None, memory_bytes: int | None):
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"the batch size must be at least 1; got {batch_size}")
        by_default = DEFAULT_BATCH_SIZE if memory_bytes is None else _MOST_ROWS
        self.max_rows = by_default if batch_size is None else batch_size
        self._model, self._memory_bytes = model, memory_bytes
        self._prices: dict[tuple[int, int], int] = {}
        self.max_positions = model.config.max_positions  # that one row may have
        if memory_bytes is not None:
            self.max_positions = self._residency(1).max_capacity(memory_bytes)

    @property
    def window_rows(self) -> int:
        """Rows to plan at a time."""
        return _BATCHES_A_WINDOW * self.max_rows

    def plan(self, rows: Sequence[Row]) -> list[Batch]:
        """Returns batches that hold every row once, the longest rows first.

        Rows are sorted by the capacity they need, then by tokens to generate, then by prompt, so that batch
        mates end together. Only the last batch is not full.
        """
        order = sorted(range(len(rows)), key=lambda index: self._sort_key(rows, index))
        batches, start = [], 0
        while start < len(order):
            capacity = self._capacity(rows[order[start]])
            members = tuple(order[start : start + self._largest(capacity)])
            batches.append(Batch(members, self._bucket(len(members)), capacity))
            start += len(members)
        return batches

    def state_bytes(self, num_rows: int, capacity: int) -> int:
        """Returns the bytes of the state that a batch allocates."""
        if (num_rows, capacity) not in self._prices:
            self._prices[num_rows, capacity] = self._residency(num_rows).allocated_bytes(capacity)
        return self._prices[num_rows, capacity]

    def _residency(self, num_rows: int) -> KvResidency:
        model = self._model
        return KvResidency.from_config(
            model.config, model.kv_window, dtype=kv_dtype(model.config), batch=num_rows
        )

    def _capacity(self, row: Row) -> int:
        return bucketed_capacity(row.num_positions, self.max_positions)

    def _sort_key(self, rows: Sequence[Row], index: int) -> tuple[int, int, int, int]:
        row = rows[index]
        return -self._capacity(row), -row.options.max_new_tokens, -len(row.token_ids), index

    def _bucket(self, num_rows: int) -> int:
        return min(1 << (num_rows - 1).bit_length(), self.max_rows)

    def _largest(self, capacity: int) -> int:
        """Returns the most rows of a batch of this capacity."""
        if self._memory_bytes is None:
            return self.max_rows
        num_rows = self.max_rows
        while num_rows > 1 and self.state_bytes(num_rows, capacity) > self._memory_bytes:
            num_rows = self._bucket_below(num_rows)
        return num_rows

    def _bucket_below(self, num_rows: int) -> int:
        return 1 << ((num_rows - 1).bit_length() - 1)
