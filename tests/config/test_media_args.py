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
