"""Functional LLM inference for JAX: span attention, states that are values, exact budgets.

What is exported is listed in `__init__.pyi`. A name is imported when it is first used: the command line
answers much (help, wrong arguments, `pull`) without the seconds that importing jax takes.
"""

from jaxinfer.exports import LazyExports as _LazyExports

__getattr__ = _LazyExports(__name__)
__dir__ = __getattr__.names
__all__ = __dir__()  # pyright: ignore[reportUnsupportedDunderAll] - it reads the stub
