"""Kernels in C++ for CPUs, called through XLA's foreign function interface: optional, compiled on request.

`python -m pallas_kernels.native` compiles every `native.cc` of the op folders for this machine's CPU, with
the C++ compiler that is there, into the folder that `directory` names. Without it every op takes its XLA
form, which means the same and is slower. Nothing is compiled unless asked for.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.ffi

from pallas_kernels.compat import target_platform

ENV = "PALLAS_KERNELS_NATIVE"
BUILD_COMMAND = "python -m pallas_kernels.native"
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-w")


def directory() -> Path | None:
    """Where the compiled library lies: $PALLAS_KERNELS_NATIVE, else the user's cache folder.

    The variable holds a folder, or `off`: None then.
    """
    chosen = os.environ.get(ENV)
    if chosen:
        return None if chosen == "off" else Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pallas_kernels"


_PACKAGE = Path(__file__).parent


def _sources() -> list[Path]:
    """The C++ files of the op folders."""
    return sorted(_PACKAGE.glob("*/native.cc"))


def library_path(folder: Path) -> Path:
    """The library's file for these sources, this jaxlib and this CPU: another machine never loads it."""
    setting = repr((importlib.metadata.version("jaxlib"), platform.machine(), _cpu_features(), _FLAGS))
    files = [*sorted(_PACKAGE.glob("*.h")), *_sources()]
    parts = [file.read_bytes() for file in files] + [setting.encode()]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return folder / f"native-{digest}.so"


def _cpu_features() -> bytes:
    """What the compiler adapts to: the instruction sets of this CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def build(folder: Path | None = None) -> Path:
    """Compiles the library, some ten seconds, and returns its path; one that is there is kept.

    Args:
      folder: where to put it; None: `directory()`.

    Raises:
      RuntimeError: there is no C++ compiler, it failed, or native kernels are turned off.
    """
    folder = directory() if folder is None else folder
    if folder is None:
        raise RuntimeError(f"native kernels are turned off: {ENV}=off")
    path = library_path(folder)
    if path.is_file():
        return path
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("native kernels need a C++17 compiler: install g++ or clang, or set CXX")
    folder.mkdir(parents=True, exist_ok=True)
    tune = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "native.so"
        headers = [f"-I{folder}" for folder in (jax.ffi.include_dir(), _PACKAGE.parent)]
        command = [compiler, *_FLAGS, tune, *headers, *map(str, _sources()), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{compiler} could not compile the native kernels:\n{done.stderr.strip()}")
        made.replace(path)  # whole or not at all, also where two processes build at once
    return path


def unavailable() -> str | None:
    """Returns why native kernels do not run here; None where they do."""
    platform = target_platform()
    if platform != "cpu":
        return f"compiled for CPUs; the target device is a {platform}"
    if _library() is not None:
        return None
    if directory() is None:
        return f"turned off by {ENV}=off"
    return f"not compiled for this machine and jaxlib: run `{BUILD_COMMAND}`"


@functools.cache
def _library() -> ctypes.CDLL | None:
    folder = directory()
    if folder is None:
        return None
    path = library_path(folder)
    return ctypes.CDLL(str(path)) if path.is_file() else None


@functools.cache
def target(symbol: str) -> str:
    """Registers a function of the library with XLA and returns the name to call it by.

    Raises:
      RuntimeError: native kernels do not run here.
    """
    library = _library()
    if library is None:
        raise RuntimeError(f"native kernels are {unavailable()}")
    name = f"pallas_kernels.{symbol}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    return name


def _main() -> int:
    try:
        print(build())
    except (RuntimeError, OSError) as error:
        print(f"{BUILD_COMMAND}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
