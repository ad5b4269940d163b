"""What a request may say of repetitions at which its text ends."""

from __future__ import annotations

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequest


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, "is 3, expected an object with max_pattern_size, min_pattern_size, min_count"),
        ({"max_pattern_size": 2}, "has a min_count of 0, must be from 2 to 1024"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "has patterns of 3 to 2 tokens"),
        ({"max_pattern_size": 1025, "min_count": 2}, "this at most 1024"),
        ({"max_pattern_size": 1.5, "min_count": 2}, "Expected `int`, got `float`"),
        ({"size": 1}, "unknown field `size`; it has max_pattern_size"),
    ],
)
def test_wrong_value_is_refused_by_name(value: object, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(repetition_detection=value)  # type: ignore[arg-type]
    assert caught.value.field == "repetition_detection"
    assert str(caught.value).startswith("repetition_detection")
    assert words in str(caught.value)


def test_beams_have_no_such_end() -> None:
    with pytest.raises(InvalidRequest, match="repetition_detection does not end beams"):
        SamplingParams(
            use_beam_search=True,
            best_of=2,
            repetition_detection={"max_pattern_size": 1, "min_count": 2},  # type: ignore[arg-type]
        )
