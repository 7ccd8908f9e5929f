import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxinfer.loading.dequantize import dequantize_rows

PACKED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K", "Q5_K", "Q3_K", "IQ4_XS")


def random_rows(kind: GGMLQuantizationType, rows: int, columns: int, seed: int) -> np.ndarray:
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    shape = (rows, columns // block_size * block_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("name", PACKED)
def test_every_bit_pattern_gives_what_the_gguf_library_gives(name):
    # Random bytes hold every quant, negative and subnormal scales, infinities and NaN.
    kind = GGMLQuantizationType[name]
    stored = random_rows(kind, 96, 512, seed=3)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(stored, kind)
        assert np.isnan(expected).any()
        got = dequantize_rows(stored, kind)
    assert got.dtype == np.float32
    assert np.array_equal(got, expected, equal_nan=True)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q6_K"])
def test_rows_are_independent_of_the_block_they_are_read_in(name):
    kind = GGMLQuantizationType[name]
    stored = random_rows(kind, 10, 512, seed=4)
    with np.errstate(all="ignore"):
        whole = dequantize_rows(stored, kind)
        parts = [dequantize_rows(stored[start:end], kind) for start, end in ((0, 1), (1, 7), (7, 10))]
    assert np.array_equal(whole, np.concatenate(parts), equal_nan=True)


@pytest.mark.parametrize(
    ("name", "dtype"), [("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)]
)
def test_plain_numbers_are_taken_as_they_are(name, dtype):
    values = np.random.default_rng(5).normal(size=(4, 6)).astype(dtype)
    assert np.array_equal(dequantize_rows(values.view(np.uint8), GGMLQuantizationType[name]), values)


def test_a_type_that_cannot_be_expanded_is_refused():
    with pytest.raises(NotImplementedError):
        dequantize_rows(np.zeros((1, 8), np.uint8), GGMLQuantizationType.I64)
