import sys
import types

import pytest

from jaxinfer.loading import resolve
from jaxinfer.loading.hub import HubError


def client(monkeypatch, snapshot_download):
    """Puts a hub client library in place whose one function is given."""
    library = types.ModuleType("huggingface_hub")
    library.__spec__ = types.SimpleNamespace()  # find_spec asks for it
    library.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)


def test_a_hub_id_is_the_directory_that_the_hub_client_gives(tmp_path, monkeypatch):
    asked = []

    def download(hub_id, *, allow_patterns):
        asked.append((hub_id, allow_patterns))
        return str(tmp_path)

    client(monkeypatch, download)
    assert resolve("owner/model-1.0") == tmp_path
    assert asked == [("owner/model-1.0", ["*.safetensors", "*.json", "*.jinja"])]


def test_what_the_hub_refuses_is_one_line(monkeypatch):
    def download(hub_id, *, allow_patterns):
        raise OSError("\n401 Client Error.\n\nRepository Not Found for url: ...")

    client(monkeypatch, download)
    with pytest.raises(
        HubError, match=r"^model 'owner/nope' does not exist here, and .*: 401 Client Error\.$"
    ):
        resolve("owner/nope")


def test_without_the_client_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"install jaxinfer\[hub\]"):
        resolve("owner/model")


@pytest.mark.parametrize("name", ["models/missing", "a/b/c", "./a/b", "owner/", "~/model", "owner/x.gguf/y"])
def test_what_looks_like_a_path_is_not_asked_for(tmp_path, monkeypatch, name):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="does not exist: pass a directory"):
        resolve(name)
