"""Where the traced program will run, which decides the form an op takes."""

import jax


def target_platform() -> str:
    """Returns "cpu", "gpu" or "tpu": the platform of the mesh in use, else the default backend's.

    An abstract mesh names the device when a program is compiled ahead of time for a machine that is not
    this one, so it goes first.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    kind = (getattr(device, "device_kind", None) or "").lower()
    if kind:
        return "tpu" if "tpu" in kind else "cpu" if "cpu" in kind else "gpu"
    backend = jax.default_backend()
    return "gpu" if backend in ("cuda", "rocm") else backend
