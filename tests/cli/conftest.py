"""One tiny chat model and one tiny base model for all tests of the command."""

from pathlib import Path

import pytest

from tests.cli.tiny_directory import write_model


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("chat"), chat=True)


@pytest.fixture(scope="session")
def base_model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("base"), chat=False, max_position_embeddings=64)


@pytest.fixture(scope="session")
def sliding_model(tmp_path_factory) -> Path:
    """Every layer slides; 4,096 positions."""
    directory = tmp_path_factory.mktemp("sliding")
    return write_model(directory, chat=False, family="mistral", max_position_embeddings=4096)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
