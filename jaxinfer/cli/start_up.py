"""How the process of a command is set up. Only the command line does this: importing the library never does.

Three things save seconds: memory in huge pages (a restart of the process with a glibc setting, before
anything is imported), no search for accelerators that are not there, and programs compiled once and kept on
disk. Each leaves alone what the environment already says.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

HUGE_PAGES = "glibc.malloc.hugetlb"  # in GLIBC_TUNABLES: "=1" asks for huge pages, "=0" here turns it off
_OLDEST_GLIBC = (2, 35)
_RESTARTED = "JAXINFER_RESTARTED"  # the process id, which a restart keeps: never restart twice

_SHORTEST_KEPT_COMPILE_S = 0.05
_ACCELERATOR_DEVICES = ("nvidia0", "nvidiactl", "dxg", "kfd", "accel*", "vfio/*")
_ACCELERATOR_VARIABLES = ("JAX_FORCE_TPU_INIT", "COLAB_TPU_ADDR", "PJRT_NAMES_AND_LIBRARY_PATHS")
_GOOGLE_PCI_VENDOR = "0x1ae0"


def restart_with_huge_pages() -> None:
    """Replaces this process by itself with huge pages for malloc, where that helps and costs little.

    It helps on a CPU under Linux: weights and caches are read at memory speed. It is done before jax is
    imported or not at all, and never where GLIBC_TUNABLES already names the setting.
    """
    restarted = os.environ.pop(_RESTARTED, None) == str(os.getpid())
    if restarted or "jax" in sys.modules or accelerator_is_likely(os.environ) or not _has_huge_pages():
        return
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if HUGE_PAGES in tunables:
        return
    tunables = ":".join(part for part in (tunables, f"{HUGE_PAGES}=1") if part)
    environment = os.environ | {"GLIBC_TUNABLES": tunables, _RESTARTED: str(os.getpid())}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _has_huge_pages() -> bool:
    if not sys.platform.startswith("linux") or not sys.executable:
        return False
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        offered = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        recent = tuple(int(part) for part in version.split(".")[:2]) >= _OLDEST_GLIBC
    except (OSError, ValueError):
        return False
    return name == "glibc" and recent and "[never]" not in offered


def configure_jax() -> None:
    """Imports jax, keeps it from looking for a TPU that is not there, and keeps compiled programs on disk."""
    import jax

    from jaxinfer.loading.cache import cache_dir

    if "JAX_PLATFORMS" not in os.environ and not accelerator_is_likely(os.environ):
        jax.config.update("jax_platforms", "cpu")
    for variable, value in (
        ("JAX_COMPILATION_CACHE_DIR", str(cache_dir() / "compiled")),
        ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", _SHORTEST_KEPT_COMPILE_S),
        ("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", -1),
    ):
        if variable not in os.environ:
            jax.config.update(variable.lower(), value)


def accelerator_is_likely(environment: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Returns whether jax may find a GPU or TPU here: True in doubt, since a real one must not be hidden.

    JAX_PLATFORMS decides where it is set. Otherwise a plugin of jax, a device file, a Google device on the
    PCI bus or a variable that TPU machines have each make one likely.
    """
    if platforms := environment.get("JAX_PLATFORMS"):
        return platforms != "cpu"
    # Importing jax sets these two where there is no TPU: the first itself, the second through libtpu.
    named = {name for name in environment if name.startswith("TPU_")} - {
        "TPU_SKIP_MDS_QUERY",
        "TPU_LIBRARY_PATH",
    }
    if named or any(name in environment for name in _ACCELERATOR_VARIABLES):
        return True
    if any(next((root / "dev").glob(pattern), None) for pattern in _ACCELERATOR_DEVICES):
        return True
    for vendor in (root / "sys/bus/pci/devices").glob("*/vendor"):
        if _text(vendor) == _GOOGLE_PCI_VENDOR:
            return True
    return importlib.util.find_spec("jax_plugins") is not None or bool(
        importlib.metadata.entry_points(group="jax_plugins")
    )


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
