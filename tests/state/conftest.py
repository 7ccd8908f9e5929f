"""float32 comparisons need float32 products, whatever the device takes by default."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _full_precision() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield
