"""How the process of a command is set up."""

import ast
import os
import sys
from pathlib import Path

import pytest

import jaxinfer.cli
from jaxinfer.cli import start_up
from jaxinfer.cli.start_up import accelerator_is_likely, restart_with_huge_pages

LIGHT_LOADING = {"cache", "fingerprint", "file_lock", "known_models", "pull", "tensor_source"}


@pytest.mark.parametrize(
    "path", sorted(Path(jaxinfer.cli.__file__).parent.glob("*.py")), ids=lambda p: p.stem
)
def test_no_module_imports_jax_or_what_needs_it_before_it_has_to(path):
    """Type checking aside, the top level imports the standard library, the cli and light parts of loading."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        else:
            continue
        for name in names:
            top, *rest = name.split(".")
            light = rest[:1] in (["cli"], ["version"])
            light = light or (rest[:1] == ["loading"] and rest[1] in LIGHT_LOADING)
            assert top in sys.stdlib_module_names or (top == "jaxinfer" and light), name


def place(root: Path, path: str, content: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(content)


@pytest.fixture
def no_plugins(monkeypatch):
    monkeypatch.setattr(start_up.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(start_up.importlib.metadata, "entry_points", lambda group: ())


@pytest.mark.usefixtures("no_plugins")
def test_nothing_here_makes_an_accelerator_unlikely(tmp_path):
    place(tmp_path, "dev/null")
    place(tmp_path, "sys/bus/pci/devices/0000:00:01.0/vendor", "0x8086\n")
    assert not accelerator_is_likely(
        {"HOME": "/root", "TPU_SKIP_MDS_QUERY": "1", "TPU_LIBRARY_PATH": "x"}, tmp_path
    )


@pytest.mark.usefixtures("no_plugins")
@pytest.mark.parametrize(
    "device", ["dev/nvidia0", "dev/nvidiactl", "dev/dxg", "dev/kfd", "dev/accel0", "dev/vfio/0"]
)
def test_a_device_file_makes_one_likely(tmp_path, device):
    place(tmp_path, device)
    assert accelerator_is_likely({}, tmp_path)


@pytest.mark.usefixtures("no_plugins")
def test_a_google_device_on_the_bus_makes_one_likely(tmp_path):
    place(tmp_path, "sys/bus/pci/devices/0000:00:05.0/vendor", "0x1ae0\n")
    assert accelerator_is_likely({}, tmp_path)


@pytest.mark.usefixtures("no_plugins")
@pytest.mark.parametrize(
    "name", ["TPU_NAME", "TPU_WORKER_ID", "JAX_FORCE_TPU_INIT", "PJRT_NAMES_AND_LIBRARY_PATHS"]
)
def test_a_variable_of_tpu_machines_makes_one_likely(tmp_path, name):
    assert accelerator_is_likely({name: "x"}, tmp_path)


def test_a_plugin_of_jax_makes_one_likely(tmp_path, monkeypatch):
    monkeypatch.setattr(start_up.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(start_up.importlib.metadata, "entry_points", lambda group: (group,))
    assert accelerator_is_likely({}, tmp_path)


def test_the_platform_variable_decides(tmp_path):
    place(tmp_path, "dev/nvidia0")
    assert not accelerator_is_likely({"JAX_PLATFORMS": "cpu", "TPU_NAME": "x"}, tmp_path)
    assert accelerator_is_likely({"JAX_PLATFORMS": "cuda,cpu"}, tmp_path / "empty")


@pytest.fixture
def restarts(monkeypatch):
    """A process that has not imported jax, with huge pages to be had; gives its restarts."""
    environments = []
    monkeypatch.setattr(os, "execve", lambda path, arguments, environment: environments.append(environment))
    monkeypatch.setattr(start_up, "_has_huge_pages", lambda: True)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.delitem(sys.modules, "jax")
    return environments


def test_a_restart_asks_for_huge_pages_beside_what_was_asked_for(restarts, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=3")
    restart_with_huge_pages()
    assert restarts[0]["GLIBC_TUNABLES"] == "glibc.malloc.check=3:glibc.malloc.hugetlb=1"


def test_a_restarted_process_does_not_restart_even_if_the_setting_got_lost(restarts, monkeypatch):
    restart_with_huge_pages()
    assert len(restarts) == 1
    del restarts[0]["GLIBC_TUNABLES"]
    monkeypatch.setattr(os, "environ", restarts[0])
    restart_with_huge_pages()
    assert len(restarts) == 1
    assert "JAXINFER_RESTARTED" not in os.environ


@pytest.mark.parametrize("setting", ["0", "1"])
def test_a_setting_of_the_user_stands(restarts, monkeypatch, setting):
    monkeypatch.setenv("GLIBC_TUNABLES", f"glibc.malloc.hugetlb={setting}")
    restart_with_huge_pages()
    assert restarts == []


def test_no_restart_with_an_accelerator_or_after_jax_is_imported(restarts, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    restart_with_huge_pages()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setitem(sys.modules, "jax", sys)
    restart_with_huge_pages()
    assert restarts == []
