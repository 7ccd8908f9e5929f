"""A job that SIGKILL ends at random moments and `--resume` goes on with: the same bytes in the end."""

import contextlib
import json
import os
import random
import sys
import time

import pytest

from jaxinfer.batch import journal_path
from tests.cli.tiny_directory import start, write_model

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX ones")

TIMEOUT_S = 300
OPTIONS = ("--max-new-tokens", "40", "--batch-size", "4", "--temperature", "1.5")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), chat=True, eos_token_id=None)


def write_rows(path, count):
    draw = random.Random(7)
    rows = []
    for index in range(count):
        row = {"id": f"r{index}", "prompt": "x" * draw.randint(1, 14)}
        rows.append("{" if index % 17 == 3 else json.dumps(row))
    path.write_text("\n".join(rows) + "\n")
    return path


def wait_for_writes(process, journal, count):
    """Waits until a journal has changed so many times after its first appearance, or the process is done."""
    seen = set()
    while process.poll() is None and len(seen) <= count:
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(journal)
            seen.add((found.st_ino, found.st_size))
        time.sleep(0.001)


def check_kills(folder, model, *, num_rows, num_kills):
    """Runs a job to its end, the same with kills after random times, and compares."""
    source = write_rows(folder / "in.jsonl", num_rows)
    whole, killed = folder / "whole.jsonl", folder / "killed.jsonl"
    options = ("--model", str(model), *OPTIONS)

    def begin(output):
        return start("batch", str(source), str(output), *options, "--resume", cache=folder / "cache")

    with begin(whole) as process:
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    draw = random.Random(num_rows)
    kills = 0
    for _ in range(num_kills):
        with begin(killed) as process:
            if draw.random() < 0.2:
                time.sleep(draw.uniform(0, 3))
            else:
                wait_for_writes(process, journal_path(killed), draw.randint(1, 5))
                time.sleep(draw.uniform(0, 0.02))
            kills += process.poll() is None
            process.kill()
            process.communicate(timeout=TIMEOUT_S)
    with begin(killed) as process:
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    records = [json.loads(line) for line in killed.read_text().splitlines()]
    assert [record["line"] for record in records] == list(range(1, num_rows + 1))
    assert killed.read_bytes() == whole.read_bytes()
    assert kills >= num_kills - 1  # one may have come too late


def test_a_few_rows_and_two_kills(tmp_path, model):
    check_kills(tmp_path, model, num_rows=30, num_kills=2)


@pytest.mark.slow
def test_200_rows_and_ten_kills(tmp_path, model):
    check_kills(tmp_path, model, num_rows=200, num_kills=10)
