"""Which jaxinfer this is."""

from __future__ import annotations

import importlib.metadata


def own_version() -> str:
    """Returns the installed version, or that it runs from a source tree that is not installed."""
    try:
        return importlib.metadata.version("jaxinfer")
    except importlib.metadata.PackageNotFoundError:
        return "(source tree)"
