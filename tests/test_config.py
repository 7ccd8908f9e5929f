"""What a config refuses when it is made."""

import pytest

from jaxinfer.config import RopeConfig

LLAMA3 = {
    "scaling": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_positions": 8192,
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scaling": "yarn"}, r"RopeConfig\(scaling=.*one of.*got 'yarn'"),
        ({"rotary_dim": 7}, r"rotary_dim=.*even and positive; got 7"),
        ({"rotary_dim": 0}, r"rotary_dim=.*even and positive; got 0"),
        ({"scaling": "linear", "factor": 0.0}, r"factor=.*must be positive"),
        ({"theta": -1.0}, r"theta=.*must be positive"),
        (LLAMA3 | {"high_freq_factor": 1.0}, r"low_freq_factor < high_freq_factor"),
        (LLAMA3 | {"original_max_positions": 0}, r"original_max_positions > 0"),
    ],
)
def test_a_rope_that_means_nothing_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig(**({"theta": 1e4, "rotary_dim": 8} | fields))
