"""Every prompt length goes through a bounded set of shapes."""

import pytest

from jaxinfer.generation.buckets import MAX_CHUNK, bucketed_capacity, plan_prefill_buckets


def test_steps_cover_the_prompt_with_at_most_a_third_padding():
    for length in range(2100):
        sizes = plan_prefill_buckets(length)
        assert all(size & (size - 1) == 0 and size <= MAX_CHUNK for size in sizes)
        assert sum(sizes[:-1]) < max(length, 1)
        assert sum(sizes) >= length
        assert sum(sizes) - length <= max(length / 3, 63)


def test_there_are_no_more_shapes_than_powers_of_two():
    shapes = {size for length in range(1, 2000) for size in plan_prefill_buckets(length)}
    assert shapes == {16, 32, 64, 128, 256, 512}


def test_a_chunk_that_is_no_power_of_two_is_refused():
    with pytest.raises(ValueError, match="power of two; got 48"):
        plan_prefill_buckets(10, 48)


def test_capacity_is_a_power_of_two_up_to_the_limit():
    assert bucketed_capacity(1, 8192) == 256
    assert bucketed_capacity(257, 8192) == 512
    assert bucketed_capacity(512, 8192) == 512
    assert bucketed_capacity(6000, 7000) == 7000
