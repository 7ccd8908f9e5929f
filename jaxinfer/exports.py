"""A package whose names are imported when they are first used; its stub file is the list of them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any


class LazyExports:
    """The `__getattr__` (PEP 562) of a package that re-exports what its `__init__.pyi` imports.

    Type checkers read the stub; so does this, once, so that there is one list. Submodules are found by name
    too, as after an eager import.
    """

    def __init__(self, package: str):
        self._package = package
        stub = Path(str(sys.modules[package].__file__)).with_suffix(".pyi")
        imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
        self._origins = {alias.asname: (node.module, alias.name) for node in imports for alias in node.names}

    def __call__(self, name: str) -> Any:
        if name in self._origins:
            module, original = self._origins[name]
            value = getattr(importlib.import_module(str(module)), original)
            setattr(sys.modules[self._package], name, value)
            return value
        submodule = f"{self._package}.{name}"
        if name.startswith("__") or importlib.util.find_spec(submodule) is None:
            raise AttributeError(f"module {self._package!r} has no attribute {name!r}")
        return importlib.import_module(submodule)

    def names(self) -> list[str]:
        """Returns what the stub exports, in its order."""
        return [str(name) for name in self._origins]
