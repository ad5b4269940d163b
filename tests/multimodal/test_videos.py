"""Frames of videos, their times, and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.errors import InvalidRequest
from octavo.multimodal.videos import MOST_FRAMES, decoded_video
from tests.fakes.vision import image

FRAMES = [image(seed, 40, 30) for seed in range(5)]


def test_frames_have_the_times_of_their_places_in_the_original() -> None:
    assert decoded_video(FRAMES).times(2) == [(0.0, 1 / 24), (2 / 24, 3 / 24), (4 / 24, 4 / 24)]
    sampled = decoded_video((FRAMES, {"fps": 10, "frames_indices": [0, 10, 20, 30, 40]}))
    assert sampled.times(2) == [(0.0, 1.0), (2.0, 3.0), (4.0, 4.0)]
    assert sampled.sampled_fps == pytest.approx(5 / 41 * 10)
    pixels = np.stack([np.asarray(each) for each in FRAMES])
    for given in (pixels, {"frames": pixels, "fps": 24}, (pixels, {})):
        read = decoded_video(given)
        assert [each.tobytes() for each in read.frames] == [each.tobytes() for each in FRAMES]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "has 0 frames, must have 1 to 128"),
        (FRAMES[:1] * (MOST_FRAMES + 1), "has 129 frames"),
        ([FRAMES[0], image(0, 40, 40)], "frames of 40 x 30 and 40 x 40 pixels"),
        (np.zeros((100, 1000, 1000, 3), dtype=np.uint8), "more than 67,108,864 pixels together"),
        ((FRAMES, {"fps": 0}), "fps=0, expected a number"),
        ((FRAMES, {"fps": "2"}), "fps=2, expected a number"),
        ((FRAMES, {"frames_indices": [0, 1]}), "5 frames and frames_indices that are not 5"),
        ((FRAMES, {"speed": 1}), "speed in its metadata; known are"),
        (b"mp4", "is bytes; give its frames, decoded"),
        ([3], "an image of the prompt is int"),
    ],
)
def test_other_videos_are_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        decoded_video(given)


@pytest.mark.parametrize("indices", [3, "ab", [0, None], [0, "x"], [0, float("nan")], [0, float("inf")], [0, 10**400]])
def test_places_of_frames_that_are_no_numbers_or_beyond_all_sense_are_refused(indices: Any) -> None:
    frames = np.zeros((2, 4, 4, 3), np.uint8)
    with pytest.raises(InvalidRequest, match="2 rising numbers from 0 to 1,000,000,000"):
        decoded_video((frames, {"frames_indices": indices}))
