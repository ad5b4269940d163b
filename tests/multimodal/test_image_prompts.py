"""Images written into prompts."""

from __future__ import annotations

import copy
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.errors import ConfigError, InvalidRequest
from octavo.multimodal.image_prompts import ImagePrompts
from tests.fakes.vision import image, make_vision_checkpoint
from tests.fakes.vision_sizes import END, IMAGE, START

NAMES = {"\n": 20, "\n\n": 21, "\n\n\n": 22, "\n\n\n\n": 23}


def encode(text: str) -> list[int]:
    """One token for up to four line breaks, one each for other texts."""
    return [NAMES[text]] if text in NAMES else [99] if text.strip() else [] if not text else [98] * len(text)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> ImagePrompts:
    checkpoint = Checkpoint.open(make_vision_checkpoint("gemma3", tmp_path_factory.mktemp("gemma3")))
    settings = image_settings(checkpoint)
    assert settings is not None
    return ImagePrompts(checkpoint, settings, encode, {"image": 16})


def written(prompts: ImagePrompts, *token_ids: int, images: int = 1) -> tuple[list[int], Any]:
    tokens, media = prompts.expand(list(token_ids), {"image": [image(0, 56, 56)] * images})
    assert all(set(tokens[offset : offset + length]) == {START} for each in media for offset, length in each.spans)
    return [each for each in tokens if each != START], media


def test_line_breaks_around_an_image_become_one_token_with_those_beside_it(prompts: ImagePrompts) -> None:
    one, _ = written(prompts, 50, IMAGE, 51)
    assert one == [50, NAMES["\n\n"], IMAGE, END, NAMES["\n\n"], 51]
    joined, media = written(prompts, 50, NAMES["\n"], IMAGE, NAMES["\n\n"], NAMES["\n"], 51)
    assert joined == [50, NAMES["\n\n\n"], IMAGE, END, NAMES["\n\n\n\n"], NAMES["\n"], 51]
    assert media[0].spans == ((3, 16),)
    assert media[0].is_whole
    two, _ = written(prompts, IMAGE, IMAGE, images=2)
    assert two == [NAMES["\n\n"], IMAGE, END, NAMES["\n\n\n\n"], IMAGE, END, NAMES["\n\n"]]


def test_another_number_of_placeholders_than_images_is_refused_with_the_text_of_one(prompts: ImagePrompts) -> None:
    prompts = copy.copy(prompts)
    prompts._token_text = {IMAGE: " <image>"}.__getitem__
    for given, found in (([50], "0 placeholders for images, but 1 image"), ([IMAGE] * 2, "2 placeholders")):
        with pytest.raises(InvalidRequest, match=f"{found}.* write one placeholder, <image>, for each image$"):
            prompts.expand(given, {"image": image(0)})


def test_an_image_that_is_cut_has_a_span_for_each_piece(prompts: ImagePrompts, tmp_path: Path) -> None:
    _, (media,) = prompts.expand([50, IMAGE], {"image": image(0)})
    assert [length for _, length in media.spans] == [16, 16, 16]
    assert media.num_embeddings == 48


@pytest.mark.parametrize(
    "given", [[1, IMAGE, 50], [IMAGE, 1, 50], [1, IMAGE, 20, 50], [IMAGE, 50, NAMES["\n"]], [IMAGE, 1, 50, 20]]
)
def test_prompts_of_paligemma_begin_behind_images_and_end_with_a_line_break(given: list[int], tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_vision_checkpoint("paligemma", tmp_path))
    settings = image_settings(checkpoint)
    assert settings is not None
    tokens, media = ImagePrompts(checkpoint, settings, encode, {"image": 1}).expand(given, {"image": image(0)})
    assert tokens == [*[IMAGE] * 16, 1, 50, NAMES["\n"]]
    assert [(each.kind, each.spans, each.is_whole) for each in media] == [
        ("image", ((0, 16),), False),
        ("prompt", ((0, 19),), True),
    ]


@pytest.mark.parametrize("given", [[1, 50, 51], [IMAGE, 1, 50, 51], [1, 50, IMAGE, 51]])
def test_the_image_of_blip_2_is_before_the_token_that_begins_the_text(given: list[int], tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_vision_checkpoint("blip_2", tmp_path))
    settings = image_settings(checkpoint)
    assert settings is not None
    reader = ImagePrompts(checkpoint, settings, encode, {"image": 2})
    tokens, (media,) = reader.expand(given, {"image": image(0)})
    assert tokens == [*[IMAGE] * 8, 1, 50, 51]
    assert media.spans == ((0, 8),)
    for images in (0, 2):
        with pytest.raises(InvalidRequest, match="image"):
            reader.expand([IMAGE, 1, 50], {"image": [image(0)] * images})
    with pytest.raises(InvalidRequest, match="has 2 images, must have at most 1"):
        reader.expand([1, 50], {"image": [image(0)] * 2})


WRITTEN = {
    "aya_vision": ["<|START_OF_IMG|>", "TILE_1", "4", "TILE_2", "4", "TILE_GLOBAL", "4", "<|END_OF_IMG|>"],
    "llama4": [
        *("<|image_start|>", "4", "<|tile_x_separator|>", "4", "<|tile_y_separator|>", "<|image|>", "4"),
        "<|image_end|>",
    ],
    "ovis2": ["1", "4", "1", "4", "1", "4", "1"],
    "minicpmv4_6": [
        *("<image_id>0</image_id><image>", "1", "</image>", "<slice>", "1", "</slice>", "<slice>", "1", "</slice>"),
    ],
    "cohere2_vision": ["<|START_OF_IMG|>", *["4", "<|IMG_LINE_BREAK|>"] * 3, "<|END_OF_IMG|>"],
    "lfm2_vl": [
        *("<|image_start|>", "<|img_row_1_col_1|>", "4", "<|img_row_1_col_2|>", "4", "<|img_thumbnail|>", "1"),
        "<|image_end|>",
    ],
}
"""Of an image in two tiles, with the number of vectors between the texts around them."""


@pytest.mark.parametrize("family", WRITTEN)
def test_tiles_are_written_as_transformers_processors_write_them(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_vision_checkpoint(family, tmp_path))
    settings, words = image_settings(checkpoint), list[str]()
    assert settings is not None

    def encode_word(text: str) -> list[int]:
        words.append(text)
        return [1000 + len(words)] if text else []

    prompts = ImagePrompts(checkpoint, settings, encode_word, {"image": 1})
    tokens, (media,) = prompts.expand([prompts.marker], {"image": image(0)})
    runs = [(token, len([*run])) for token, run in groupby(tokens)]
    assert [words[token - 1001] if token > 1000 else str(count) for token, count in runs] == WRITTEN[family]
    assert sum(length for _, length in media.spans) == sum(count for token, count in runs if token < 1000)


@pytest.mark.parametrize("family", ["glm4v", "qwen2_vl"])
def test_a_person_may_set_how_large_images_are(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_vision_checkpoint(family, tmp_path))
    settings = image_settings(checkpoint)
    assert settings is not None

    def num_vectors(**changes: Any) -> int:
        made = ImagePrompts(checkpoint, settings, encode, {"image": 16, "video": 1}, changes)
        _, (media,) = made.expand([50, IMAGE], {"image": image(0, 112, 112)})
        return media.num_embeddings

    assert num_vectors() > num_vectors(max_pixels=56 * 56) >= 1
    with pytest.raises(ConfigError, match="mm_processor_kwargs has max_patches, which .* does not have; leave it out"):
        num_vectors(max_patches=2)


def test_an_image_with_more_patches_on_a_side_than_gemma_4_has_positions_for_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_vision_checkpoint("gemma4", tmp_path))
    settings = image_settings(checkpoint)
    assert settings is not None
    reader = ImagePrompts(checkpoint, settings, encode, {"image": 1, "video": 0})
    with pytest.raises(InvalidRequest, match="162 patches on a side, .* position_embedding_size, which is 64; cut"):
        reader.expand([50, reader.marker, 51], {"image": image(0, 7, 300)})
