"""The command as a process of its own: help, signals, pipes, and the settings that only a process gets."""

import os
import signal
import subprocess
import sys

import pytest

from jaxinfer.cli.start_up import _has_huge_pages
from tests.cli.tiny_directory import ROOT, start, write_model

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and pipes are POSIX ones")

TIMEOUT_S = 300


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory):
    """A model that generates for minutes: many positions, no end token."""
    directory = tmp_path_factory.mktemp("endless")
    return write_model(directory, chat=False, max_position_embeddings=1 << 20, eos_token_id=None)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache that the processes of this module share."""
    return tmp_path_factory.mktemp("cache")


def endless(model, cache) -> subprocess.Popen[bytes]:
    return start("generate", "hello", "--model", str(model), "--max-new-tokens", "100000", cache=cache)


def test_help_lists_the_commands(cache):
    with start("--help", cache=cache) as process:
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert err == b""
    assert all(name in out.decode() for name in ("generate", "chat", "pull", "info"))


def test_an_interrupt_keeps_the_text_and_leaves_one_line_and_the_compiled_programs(endless_model, cache):
    with endless(endless_model, cache) as process:
        first = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert len(first) == 20
    assert out.endswith(b"\n")
    assert err.startswith(b"jaxinfer: interrupted after ")
    assert err.count(b"\n") == 1
    kept = [path.name for path in (cache / "compiled").iterdir()]
    assert any(name.startswith("jit_decode_steps") for name in kept)


def test_an_interrupt_does_not_wait_for_a_compilation(endless_model, cache):
    script = (
        "import sys, time, jaxinfer.generation, jaxinfer.cli\n"
        "def generate(*args, **options):\n"
        "    print('compiling', flush=True)\n"
        f"    time.sleep({2 * TIMEOUT_S})\n"
        "jaxinfer.generation.generate = generate\n"
        "sys.exit(jaxinfer.cli.main())"
    )
    arguments = ("generate", "hello", "--model", str(endless_model))
    with start(*arguments, cache=cache, script=script) as process:
        assert process.stdout.readline() == b"compiling\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert out == b""
    assert err == b"jaxinfer: interrupted after 0 tokens\n"


def test_a_reader_that_is_gone_is_no_error_to_tell(endless_model, cache):
    with endless(endless_model, cache) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(TIMEOUT_S) == 141


def test_a_closed_stdout_is_a_failure_at_once(cache):
    with start("generate", "hello", "--model", "nowhere", cache=cache, redirect=">&-") as process:
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert err == b"jaxinfer: error: standard output is closed\n"


def test_a_command_restarts_itself_once_with_huge_pages(cache):
    """As seen from its environment, read by the command that would run next: it reports a wrong model."""
    script = (
        "import os, sys; from jaxinfer.cli import main; code = main(); "
        "print(os.environ.get('GLIBC_TUNABLES')); sys.exit(code)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAXINFER_CACHE": str(cache), "JAX_PLATFORMS": "cpu"}
    environment.pop("GLIBC_TUNABLES", None)
    command = [sys.executable, "-c", script, "info", "--model", "nowhere"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ran.returncode == 2
    assert ran.stdout.strip() == ("glibc.malloc.hugetlb=1" if _has_huge_pages() else "None")
