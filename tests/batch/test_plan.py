"""Batches: every row once, like with like, and never a byte above the limit."""

import jax
import pytest

from jaxinfer import init_state
from jaxinfer.batch.answer import prefill_chunk
from jaxinfer.batch.encode import Row
from jaxinfer.batch.plan import BatchPlanner
from jaxinfer.batch.request import Defaults, parse_row
from jaxinfer.generation import kv_dtype
from jaxinfer.generation.rows import RowOptions
from jaxinfer.testing import tiny_model

MODEL = tiny_model(max_positions=1024)


def rows(*sizes):
    """Rows of (prompt tokens, new tokens)."""
    request = parse_row(b'{"prompt": "x"}', 1, Defaults())
    return [Row(request, (1,) * prompt, RowOptions(new)) for prompt, new in sizes]


def allocated(num_rows, capacity):
    state = init_state(MODEL.config, batch=num_rows, capacity=capacity, dtype=kv_dtype(MODEL.config))
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def test_every_row_is_in_one_batch_the_longest_first_and_only_the_last_is_padded():
    given = rows(*((1 + 37 * index % 240, 1 + index % 3) for index in range(11)), (500, 9))
    batches = BatchPlanner(MODEL, batch_size=3, memory_bytes=None).plan(given)
    members = [member for batch in batches for member in batch.members]
    assert sorted(members) == list(range(12))
    assert members[0] == 11
    assert [(len(batch.members), batch.num_rows) for batch in batches] == [(3, 3)] * 4
    assert [batch.capacity for batch in batches] == [512, 256, 256, 256]
    again = [(given[member].options.max_new_tokens, len(given[member].token_ids)) for member in members[3:]]
    assert again == sorted(again, reverse=True)


@pytest.mark.parametrize(("batch_size", "left", "padded"), [(8, 5, 8), (6, 5, 6), (6, 3, 4), (6, 1, 1)])
def test_a_batch_that_is_not_full_is_padded_to_a_size_of_few(batch_size, left, padded):
    planner = BatchPlanner(MODEL, batch_size=batch_size, memory_bytes=None)
    assert planner.plan(rows(*[(3, 3)] * left))[0].num_rows == padded


def test_a_batch_costs_at_most_the_limit_to_the_byte():
    limit = allocated(4, 256)
    given = rows((400, 9), *[(20, 9)] * 9)
    for less, most in ((0, 4), (1, 2)):
        planner = BatchPlanner(MODEL, batch_size=None, memory_bytes=limit - less)
        batches = planner.plan(given)
        shapes = [(batch.num_rows, batch.capacity) for batch in batches]
        assert shapes == [(2, 512)] + [(most, 256)] * (8 // most)
        for batch in batches:
            assert planner.state_bytes(batch.num_rows, batch.capacity) == allocated(
                batch.num_rows, batch.capacity
            )


def test_the_memory_bounds_the_positions_of_a_row():
    planner = BatchPlanner(MODEL, batch_size=None, memory_bytes=allocated(1, 300))
    assert planner.max_positions == 300
    assert planner.plan(rows((290, 9)))[0].capacity == 300
    with pytest.raises(ValueError, match="must be at least"):
        BatchPlanner(MODEL, batch_size=None, memory_bytes=allocated(1, 1) - 1)


def test_a_prefill_step_has_fewer_columns_a_row_where_rows_are_many():
    assert [prefill_chunk(rows) for rows in (1, 16, 17, 64, 100, 4096)] == [512, 512, 256, 128, 64, 16]
