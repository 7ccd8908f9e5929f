import sys
from pathlib import Path

import pytest

from jaxinfer.loading.cache import ModelNotPulledError, cache_dir, is_pulled, resolve
from jaxinfer.loading.known_models import KNOWN_MODELS


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))


def test_a_known_name_that_is_not_pulled_says_how_to_pull_it(tmp_path):
    with pytest.raises(
        ModelNotPulledError, match=r"model 'smollm2-135m' is not in .*cache: run `jaxinfer pull"
    ):
        resolve("smollm2-135m")


def test_directories_and_gguf_files_stand_for_themselves(tmp_path):
    file = tmp_path / "x.gguf"
    file.touch()
    assert resolve(file) == file
    assert resolve(str(tmp_path)) == tmp_path


def test_a_known_name_wins_over_a_directory_unless_written_as_a_path(tmp_path, monkeypatch):
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotPulledError):
        resolve("smollm2-135m")
    assert resolve("./smollm2-135m") == Path("smollm2-135m")


@pytest.mark.parametrize(
    ("name", "problem"), [("nope", "does not exist"), ("text.txt", "is not a .gguf file")]
)
def test_anything_else_lists_what_could_be_meant(tmp_path, monkeypatch, name, problem):
    (tmp_path / "text.txt").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"model '{name}' {problem}: .*smollm2-135m, gemma3-270m"):
        resolve(name)


@pytest.mark.skipif(sys.platform == "win32", reason="the folder is another one there")
def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("JAXINFER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "jaxinfer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "jaxinfer"


@pytest.mark.parametrize("model", KNOWN_MODELS.values(), ids=KNOWN_MODELS)
def test_pins_are_whole(model):
    assert KNOWN_MODELS[model.name] is model
    assert not is_pulled(model)
    assert all(len(digest) == 64 for digest in (model.sha256, *(wheel.sha256 for wheel in model.wheels)))
    assert all("==" in wheel.requirement for wheel in model.wheels)
    assert any(wheel.licence_members for wheel in model.wheels)
    parts = [wheel.member for wheel in model.wheels if wheel.member]
    assert parts == sorted(parts)
