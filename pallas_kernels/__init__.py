"""Attention kernels that take arrays and plain numbers: one folder an op, one file a backend.

Every op has a `reference` (its meaning in plain jnp), an `xla` form (CPU and older GPUs) and Pallas
kernels named for their compiler. Nothing here imports `jaxinfer`.
"""
