"""The one place for what differs between jax versions or is not part of its public surface."""

from __future__ import annotations

from typing import Literal

import jax

Platform = Literal["cpu", "gpu", "tpu"]
_GPU_NAMES = ("gpu", "cuda", "rocm")


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
