"""A sequence that repeats itself is found at the token with which the last repetition is complete."""

from __future__ import annotations

import random

import pytest

from octavo.core.repetition import RepetitionDetectionParams
from octavo.core.sampling_params import SamplingParams
from octavo.errors import InvalidRequest


def ends_plainly(wanted: RepetitionDetectionParams, output: list[int]) -> bool:
    return any(
        output[-size * wanted.min_count :] == output[-size:] * wanted.min_count
        for size in range(max(wanted.min_pattern_size, 1), wanted.max_pattern_size + 1)
        if size * wanted.min_count <= len(output)
    )


@pytest.mark.parametrize(
    ("output", "sizes", "count", "found"),
    [
        ([1, 2, 1, 2, 1, 2], (1, 2), 3, True),
        ([1, 2, 1, 2, 1], (1, 2), 3, False),
        ([1, 2, 1, 2, 1, 2], (0, 1), 3, False),
        ([1, 1, 1, 1], (2, 2), 2, True),
        ([1, 1, 1], (2, 3), 2, False),
        ([7, 7, 7], (0, 0), 0, False),
    ],
)
def test_repetition_is_one_of_the_sizes_so_many_times(
    output: list[int], sizes: tuple[int, int], count: int, found: bool
) -> None:
    wanted = RepetitionDetectionParams(min_pattern_size=sizes[0], max_pattern_size=sizes[1], min_count=count)
    assert wanted.ends(output, len(output)) is found


def test_tokens_of_the_prompt_are_no_part_of_a_repetition() -> None:
    wanted = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    assert not wanted.ends([1, 2, 1, 2, 1, 2], 5)
    assert wanted.ends([9, 1, 2, 1, 2, 1, 2], 6)


def test_random_sequences_end_where_plain_comparison_finds_a_repetition() -> None:
    numbers = random.Random(0)
    found = 0
    for _ in range(3000):
        output = numbers.choices(range(3), k=numbers.randint(1, 16))
        least = numbers.randint(0, 4)
        wanted = RepetitionDetectionParams(
            min_pattern_size=least, max_pattern_size=numbers.randint(least, 6), min_count=numbers.randint(2, 4)
        )
        expected = ends_plainly(wanted, output)
        assert wanted.ends([0, 1, 2, *output], len(output)) is expected
        found += expected
    assert 100 < found < 2900


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
