"""Placeholders written out as the processors of transformers do, and the rope positions of images."""

import dataclasses

import numpy as np
import pytest

from jaxinfer.images import (
    ImageError,
    expand_ids,
    expand_text,
    image_prompt,
    locate_images,
    mrope_positions,
)
from jaxinfer.testing import tiny_config

SPELLINGS = {264: "<start_of_image>", 265: "<end_of_image>", 262: "<image>"}
GEMMA, QWEN = tiny_config("gemma3_image"), tiny_config("qwen3_vl")
IMAGE = 262


@dataclasses.dataclass(frozen=True)
class Facts:
    grid: tuple
    num_tokens: int
    digest: str


ONE, SQUARE, WIDE = Facts((1, 2, 2), 1, "one"), Facts((1, 4, 4), 4, "square"), Facts((1, 2, 6), 3, "wide")


def written(config, text, images):
    return expand_text(text, images, config=config, spell=SPELLINGS.__getitem__)


def test_gemma_puts_newlines_and_marks_around_an_images_tokens():
    expected = "a\n\n<start_of_image><image><image><image><end_of_image>\n\nb"
    assert written(GEMMA, "a<start_of_image>b", [WIDE]) == expected


def test_qwen_repeats_the_placeholder_between_the_marks_that_the_template_wrote():
    text = "<start_of_image><image><end_of_image><image>"
    assert written(QWEN, text, [SQUARE, ONE]) == f"<start_of_image>{'<image>' * 4}<end_of_image><image>"


@pytest.mark.parametrize(("config", "mark"), [(GEMMA, "<start_of_image>"), (QWEN, "<image>")])
@pytest.mark.parametrize(("count", "images"), [(0, [ONE]), (2, [ONE]), (1, [])])
def test_another_number_of_placeholders_than_images_is_refused_with_both(config, mark, count, images):
    with pytest.raises(
        ImageError, match=rf"{count} image placeholders \('{mark}'\) for {len(images)} images"
    ):
        written(config, mark * count, images)


def test_a_placeholder_among_ids_is_repeated_unless_that_was_done():
    once, whole = [7, IMAGE, 8, IMAGE], [7, *[IMAGE] * 4, 8, IMAGE]
    assert expand_ids(once, [SQUARE, ONE], image_token_id=IMAGE) == whole
    assert expand_ids(whole, [SQUARE, ONE], image_token_id=IMAGE) == whole
    with pytest.raises(ImageError, match=r"3 image placeholders \(token 262\) for 2 images; write one for"):
        expand_ids([IMAGE] * 3, [SQUARE, ONE], image_token_id=IMAGE)


def test_images_side_by_side_have_columns_of_their_own():
    ids = [IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, 9]
    found = locate_images(ids, [SQUARE, ONE], image_token_id=IMAGE, offset=10)
    assert found == ((10, 14, "square"), (14, 15, "one"))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([IMAGE, 5, IMAGE, IMAGE], "image 0 are not side by side: they lie in columns 0 to 3"),
        ([IMAGE], "1 image placeholders"),
    ],
)
def test_placeholders_that_are_no_image_are_refused(ids, message):
    with pytest.raises(ImageError, match=message):
        locate_images(ids, [WIDE], image_token_id=IMAGE)


def test_fault_22_positions_of_two_images_in_qwen3_vl():
    ids = [1, 2, 264, *[IMAGE] * 4, 5, 264, *[IMAGE] * 4, 7]
    positions = image_prompt(ids, [SQUARE, SQUARE], config=QWEN).positions
    assert positions[:, :3].tolist() == [[0, 1, 2]] * 3
    assert positions[:, 3:7].tolist() == [[3, 3, 3, 3], [3, 3, 4, 4], [3, 4, 3, 4]]
    assert positions[:, 7:9].tolist() == [[5, 6]] * 3
    assert positions[:, 9:13].tolist() == [[7, 7, 7, 7], [7, 7, 8, 8], [7, 8, 7, 8]]
    assert positions[:, 13].tolist() == [9] * 3
    assert positions.max() + 1 - len(ids) == -4  # the delta; the next position is 10


def test_positions_of_images_at_both_ends_side_by_side_and_of_one_token():
    positions = mrope_positions(9, [(0, 3), (3, 4), (5, 9)], [(1, 3), (1, 1), (2, 2)])
    assert positions.tolist() == [
        [0, 0, 0, 3, 4, 5, 5, 5, 5],
        [0, 0, 0, 3, 4, 5, 5, 6, 6],
        [0, 1, 2, 3, 4, 5, 6, 5, 6],
    ]
    assert positions.dtype == np.int32


def test_a_prompt_without_images_or_of_a_model_with_one_axis_has_no_positions():
    assert image_prompt([1, 2], [], config=QWEN).positions is None
    prompt = image_prompt([IMAGE] * 3, [WIDE], config=GEMMA)
    assert prompt.positions is None
    assert prompt.content == ((0, 3, "wide"),)
