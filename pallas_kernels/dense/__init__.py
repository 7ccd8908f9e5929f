"""A matrix times a few rows, at the speed of reading the matrix: what a decode step is made of."""

from pallas_kernels.dense.api import takes
from pallas_kernels.dense.native import dense_native
from pallas_kernels.dense.reference import dense_reference

__all__ = ["dense_native", "dense_reference", "takes"]
