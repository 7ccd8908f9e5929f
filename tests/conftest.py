"""Test set-up: tests run on the CPU unless JAX_PLATFORMS says otherwise; `real` tests need a pulled model.

On a GPU: `JAX_PLATFORMS=cuda python -m pytest -m gpu`.
"""

import gc
import os

import hypothesis
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported
# Most of a test's time is LLVM's; XLA's own passes stay on. Set it to 0 for programs as users get them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# Tests of the native kernels compile their own; what a user has compiled must not change the others.
os.environ.setdefault("PALLAS_KERNELS_NATIVE", "off")

# The same examples on every run, so that a run says something about the change and not about luck.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


# A Linux process may hold 65,530 memory maps and each compiled program holds a few; without one more the
# compiler dies.
_MOST_MAPS = 25_000


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_do_not_pile_up():
    """Drops the programs of earlier modules before the process runs out of memory maps."""
    yield
    try:
        with open("/proc/self/maps") as maps:
            num_maps = sum(1 for _ in maps)
    except OSError:
        return
    if num_maps > _MOST_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test marked `real("name")` while that model is not in the cache."""
    for marker in item.iter_markers("real"):
        from jaxinfer.loading import ModelNotPulledError, resolve

        try:
            resolve(*marker.args)
        except ModelNotPulledError as error:
            pytest.skip(str(error))
