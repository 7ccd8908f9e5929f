"""Every notebook runs from top to bottom, is stored without outputs, and installs from the project's one URL."""

import tomllib
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.cli.tiny_directory import ROOT, write_model

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SOURCE_URL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
SETUP = f'''# On Colab this installs the package; elsewhere it changes nothing.
import sys

if "google.colab" in sys.modules:
    %pip install -q "jaxinfer[plot] @ git+{SOURCE_URL}"'''


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request) -> nbformat.NotebookNode:
    return nbformat.read(request.param, as_version=4)


def test_there_are_notebooks():
    assert NOTEBOOKS


def test_a_notebook_is_valid_and_stored_without_outputs(notebook):
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code)


def test_the_first_cell_installs_from_the_url_of_the_project(notebook):
    assert notebook.cells[0].source == SETUP


def test_a_notebook_runs_with_a_tiny_model(notebook, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("JAXINFER_NOTEBOOK_MODEL", str(write_model(tmp_path / "model", chat=True)))
    monkeypatch.setenv("JAXINFER_NOTEBOOK_NEW_TOKENS", "3")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MPLBACKEND", "agg")
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(tmp_path))
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
