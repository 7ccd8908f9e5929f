"""The native kernels, compiled once a session into a folder of its own."""

import pytest

from pallas_kernels import native


@pytest.fixture(scope="session")
def compiled_native(tmp_path_factory):
    """The folder of a compiled library; skips where there is no C++ compiler."""
    folder = tmp_path_factory.mktemp("native")
    try:
        native.build(folder)
    except RuntimeError as error:
        if "need a C++17 compiler" not in str(error):
            raise
        pytest.skip(str(error))
    return folder


@pytest.fixture
def native_kernels(compiled_native, monkeypatch):
    """Native kernels run in this test."""
    monkeypatch.setenv(native.ENV, str(compiled_native))
    native._library.cache_clear()
    native.target.cache_clear()
    yield
    native._library.cache_clear()
    native.target.cache_clear()
