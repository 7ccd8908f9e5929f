"""`import jaxinfer` is light; its names are there all the same."""

import subprocess
import sys

import pytest

import jaxinfer


def imported_after(statement: str) -> set[str]:
    script = f"import sys; {statement}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(ran.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "statement",
    [
        "import jaxinfer",
        "from jaxinfer.cli import main; main(['--help'])",
        "from jaxinfer.cli import main; main(['generate', 'x', '--top-k', 'many'])",
        "from jaxinfer.cli import main; main(['pull', '--list'])",
    ],
)
def test_what_needs_no_jax_does_not_import_it(statement):
    assert not imported_after(statement) & {"jax", "flax"}


def test_every_exported_name_is_there():
    assert "generate" in jaxinfer.__all__
    assert dir(jaxinfer) == sorted(jaxinfer.__all__)
    for name in jaxinfer.__all__:
        assert getattr(jaxinfer, name) is not None


def test_a_name_is_the_object_of_its_module():
    from jaxinfer.generation import generate

    assert jaxinfer.generate is generate
    assert jaxinfer.generation.generate is generate


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'jaxinfer' has no attribute 'nope'"):
        jaxinfer.nope  # noqa: B018
