"""The one place for what differs between jax versions or is not part of its public surface."""

from __future__ import annotations

import re
from typing import Any, Literal

import jax

Platform = Literal["cpu", "gpu", "tpu"]
_GPU_NAMES = ("gpu", "cuda", "rocm")
_MOSAIC_GPU_SINCE = (0, 11, 2)
# Devices of compute capability 9.0; a device that is not there has a name only.
_HOPPER_NAME = re.compile(r"\b(H20|H100|H200|H800|GH200)\b")


# The first jax whose Pallas TPU interface the kernels are written for.
PALLAS_TPU_SINCE = (0, 11, 2)


def pallas_tpu_refusal() -> str | None:
    """Returns why this jax does not run the Pallas TPU kernels, None where it does."""
    if jax.__version_info__[:3] >= PALLAS_TPU_SINCE:
        return None
    needed = ".".join(map(str, PALLAS_TPU_SINCE))
    return f"it needs jax >= {needed}; this is jax {jax.__version__}"


def target_platform() -> Platform:
    """Returns what the current trace compiles for.

    A mesh in use names its device, which is how code is compiled for a device that is not there;
    without one it is jax's default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    if name in _GPU_NAMES:
        return "gpu"
    if name in ("cpu", "tpu"):
        return name
    raise NotImplementedError(f"kernels know the platforms cpu, gpu and tpu; got {name!r}")


def hopper_refusal() -> str | None:
    """Returns why a Mosaic GPU kernel for Hopper does not run on what the trace compiles for, or None."""
    platform = target_platform()
    if platform != "gpu":
        return f"it is compiled by Mosaic for NVIDIA GPUs; the target device is a {platform}"
    if jax.__version_info__ < _MOSAIC_GPU_SINCE:
        needed = ".".join(map(str, _MOSAIC_GPU_SINCE))
        return f"it needs jax {needed} or newer; this is jax {jax.__version__}"
    named: Any = jax.sharding.get_abstract_mesh().abstract_device
    device = jax.devices()[0] if named is None else named
    kind = str(device.device_kind)
    by_name = "9.0" if _HOPPER_NAME.search(kind) else "unknown"
    capability = str(getattr(device, "compute_capability", by_name))
    if capability.partition(".")[0] == "9":
        return None
    return (
        f"it multiplies with Hopper's wgmma, compute capability 9.x; the target device, {kind!r}, has "
        f"compute capability {capability}"
    )
