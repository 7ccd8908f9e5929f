"""Imports go one way and files lie where the architecture says; read from the source, importing nothing."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Each part of jaxinfer and what it stands on; a part may import those and whatever they stand on.
STANDS_ON = {
    "exports": (),
    "version": (),
    "spans": (),
    "config": ("spans",),
    "state": ("config",),
    "prefix": ("state",),
    "images": ("config",),
    "ops": ("config",),
    "nn": ("state", "ops"),
    "models": ("nn",),
    "loading": ("models",),
    "testing": ("loading",),
    "sampling": (),
    "generation": ("models", "images", "sampling", "state"),
    "chat": ("generation", "prefix"),
    "batch": ("generation", "prefix", "version"),
    "measuring": ("generation", "loading"),
    "cli": ("chat", "batch", "measuring", "loading", "version"),
    "__main__": ("cli",),
}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "v2"}


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, at any depth: inside functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports absolutely"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part(path: Path) -> str:
    """The part of jaxinfer that a file belongs to: its folder's name, or its own."""
    return path.relative_to(ROOT / "jaxinfer").parts[0].removesuffix(".py")


def foundations(name: str) -> set[str]:
    """The part itself and everything it stands on, directly or not."""
    return {name}.union(*(foundations(below) for below in STANDS_ON[name]))


DOORS = {ROOT / "jaxinfer" / "__init__.py", ROOT / "jaxinfer" / "__main__.py"}  # not parts, but ways in
LIBRARY = [path for path in modules("jaxinfer") if path not in DOORS]
KERNELS = modules("pallas_kernels")


def importing(paths: list[Path], *packages: str) -> dict[str, list[str]]:
    """The files among `paths` that import something of `packages`, with what they import."""
    found = {}
    for path in paths:
        if names := sorted(name for name in imports(path) if name.split(".")[0] in packages):
            found[str(path.relative_to(ROOT))] = names
    return found


def test_every_file_belongs_to_a_part_of_the_architecture():
    assert {part(path) for path in LIBRARY} <= STANDS_ON.keys()


@pytest.mark.parametrize("name", STANDS_ON)
def test_a_part_imports_only_what_it_stands_on(name):
    forbidden = {
        (file, imported)
        for file, names in importing([path for path in LIBRARY if part(path) == name], "jaxinfer").items()
        for imported in names
        if [*imported.split("."), ""][1] not in foundations(name)
    }
    assert not forbidden, f"{name} may import {sorted(foundations(name))}"


def test_only_ops_imports_the_kernels():
    assert not importing([path for path in LIBRARY if part(path) != "ops"], "pallas_kernels")


def test_kernels_never_import_the_library():
    assert KERNELS
    assert not importing(KERNELS, "jaxinfer")


def test_what_the_oracles_are_made_with_is_never_imported():
    assert not importing(LIBRARY + KERNELS, "torch", "transformers")


def test_a_kernel_folder_holds_one_op_with_its_meaning_beside_it():
    folders = {path.parent for path in KERNELS} - {ROOT / "pallas_kernels"}
    assert {folder.parent for folder in folders} == {ROOT / "pallas_kernels"}
    for folder in folders:
        assert {"__init__", "api", "reference"} <= {path.stem for path in folder.glob("*.py")}, folder


def test_the_planner_imports_no_arrays():
    planner = ROOT / "jaxinfer" / "prefix" / "planner.py"
    assert not importing([planner], "jax", "numpy", "flax")
    assert not {name for name in imports(planner) if name.startswith("jaxinfer.state")}


def test_the_files_of_a_batch_job_know_nothing_of_arrays():
    files = [ROOT / "jaxinfer" / "batch" / f"{name}.py" for name in ("durable", "journal", "lines", "paths")]
    assert not importing(files, "jax", "numpy", "flax")
    assert all(
        name.startswith("jaxinfer.batch") for names in importing(files, "jaxinfer").values() for name in names
    )


def test_a_file_is_named_for_what_it_holds():
    names = {name for path in LIBRARY + KERNELS for name in path.relative_to(ROOT).with_suffix("").parts}
    assert not names & VAGUE_NAMES


def test_numpy_oracles_import_neither_package_nor_jax():
    oracles = [path for path in modules("tests") if path.stem in ("oracles", "tiny_checkpoints")]
    assert oracles
    assert not importing(oracles, "jax", "flax", "jaxinfer", "pallas_kernels")


@pytest.mark.parametrize("name", ["__init__.py", "__init__.pyi"])
def test_the_package_root_only_re_exports(name):
    root = ROOT / "jaxinfer" / name
    for node in ast.parse(root.read_text()).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_dunder = isinstance(node, ast.Assign) and all(
            isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets
        )
        assert isinstance(node, ast.ImportFrom | ast.Import) or is_docstring or is_dunder, ast.unparse(node)
