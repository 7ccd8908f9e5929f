"""Images in the rows of a job: relative to the file, errors of their own rows, part of the job's identity."""

import json

import numpy as np
import pytest
from PIL import Image

import jaxinfer as ji
from jaxinfer.batch import Defaults, JobSettings, run_job
from jaxinfer.batch.paths import ResumeError
from jaxinfer.testing import tiny_config, tiny_model

MODEL = tiny_model("gemma3_image", seed=5, layers=tiny_config("gemma3_image").layers[-1:])
SETTINGS = JobSettings(Defaults(max_new_tokens=2), batch_size=4)


def draw(path, seed):
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (9, 9, 3)).astype(np.uint8)).save(path)


@pytest.fixture
def rows(tmp_path):
    draw(tmp_path / "a.png", 1)
    (tmp_path / "broken.png").write_bytes(b"no image")
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    lines = [
        {"prompt": "see <start_of_image>", "images": ["a.png"]},
        {"prompt": "text"},
        {"messages": [{"role": "user", "content": parts}], "images": ["a.png"]},
        {"prompt": "see <start_of_image>", "images": ["broken.png"]},
        {"prompt": "see", "images": ["a.png"]},
        {"prompt": "see", "images": "a.png"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_rows_with_images_are_answered_beside_text_and_bad_images_are_errors(rows, tmp_path):
    out = tmp_path / "out.jsonl"
    run_job(MODEL, rows, out, SETTINGS)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    [alone] = ji.generate(MODEL, "see <start_of_image>", images=[tmp_path / "a.png"], max_new_tokens=2)
    assert records[0]["token_ids"] == list(alone.token_ids)
    assert "text" in records[1]
    assert "text" in records[2]
    assert "images[0]" in records[3]["error"]
    assert "0 image placeholders" in records[4]["error"]
    assert "images must be a list of paths" in records[5]["error"]


def test_another_image_under_the_same_name_is_another_job(rows, tmp_path):
    out = tmp_path / "out.jsonl"
    run_job(MODEL, rows, out, SETTINGS)
    draw(tmp_path / "a.png", 2)
    with pytest.raises(ResumeError, match="the images that the input names are not the same"):
        run_job(MODEL, rows, out, SETTINGS, existing="resume")
