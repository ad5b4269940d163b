"""How many images a prompt may have, as an object, as pairs and from the command line."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config.args import EngineArgs
from octavo.config.media_args import MOST_IMAGES, media_limits
from octavo.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "most"), [({}, MOST_IMAGES), ({"image": 0}, 0), ("image=4", 4), ('{"image": 5}', 5), (["image=6"], 6)]
)
def test_images_of_a_prompt_are_counted_in_whole_numbers(given: Any, most: int) -> None:
    assert repr(media_limits(EngineArgs(limit_mm_per_prompt=given))["image"]) == repr(most)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image": 2.5}, "of image is 2.5, must be a whole number"),
        ("image=many", "of image is many, must be a whole number"),
        ({"image": -1}, "from 0 to 1024"),
        ({"hologram": 1}, "has hologram=1, expected image, video, audio"),
    ],
)
def test_other_limits_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        media_limits(EngineArgs(limit_mm_per_prompt=given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"do_rescale": False}, "has do_rescale; known are do_image_splitting, max_"),
        ({"max_pixel": 602112}, "has max_pixel; known are .*; did you mean max_pixels[?]$"),
        ({"max_pixels": -1}, "has max_pixels=-1, expected 1 to 2,147,483,648"),
        ({"max_pixels": "many"}, "has max_pixels=many, expected 1 to"),
        ({"min_pixels": (1 << 25) + 1}, "has min_pixels=33554433, expected 1 to 33,554,432"),
        ({"max_patches": True}, "has max_patches=True, expected 1 to 256"),
        ({"do_image_splitting": 1}, "has do_image_splitting=1, expected true or false"),
    ],
)
def test_other_settings_of_images_are_refused(given: Any, message: str) -> None:
    media_limits(EngineArgs(mm_processor_kwargs={"max_pixels": 12_544, "do_image_splitting": False}))
    with pytest.raises(ConfigError, match=f"mm_processor_kwargs {message}"):
        media_limits(EngineArgs(mm_processor_kwargs=given))
