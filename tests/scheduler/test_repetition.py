"""A sequence that repeats itself is found at the token with which the last repetition is complete."""

from __future__ import annotations

import random
import time

import pytest

from octavo.core.repetition import RepetitionDetectionParams
from octavo.scheduler.repetition import Repetition


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
def test_a_repetition_has_one_of_the_sizes(output: list[int], sizes: tuple[int, int], count: int, found: bool) -> None:
    wanted = RepetitionDetectionParams(min_pattern_size=sizes[0], max_pattern_size=sizes[1], min_count=count)
    assert Repetition(wanted).ends(output, len(output)) is found


def test_tokens_of_the_prompt_are_no_part_of_a_repetition() -> None:
    wanted = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    assert not Repetition(wanted).ends([1, 2, 1, 2, 1, 2], 5)
    assert Repetition(wanted).ends([9, 1, 2, 1, 2, 1, 2], 6)


def test_random_sequences_end_where_plain_comparison_finds_a_repetition() -> None:
    numbers = random.Random(0)
    found = 0
    for _ in range(400):
        least = numbers.randint(0, 4)
        wanted = RepetitionDetectionParams(
            min_pattern_size=least, max_pattern_size=numbers.randint(least, 6), min_count=numbers.randint(2, 4)
        )
        output: list[int] = []
        repetition = Repetition(wanted)
        for _ in range(numbers.randint(1, 16)):
            output += numbers.choices(range(3), k=numbers.randint(1, 4))
            if numbers.random() < 0.3:
                other = repetition.fork()
                other.ends([0, *output, 1], len(output) + 1)
            expected = ends_plainly(wanted, output)
            assert repetition.ends([0, 1, 2, *output], len(output)) is expected
            found += expected
    assert 100 < found < 2900


def test_a_text_of_two_tokens_costs_no_more_than_others() -> None:
    numbers = random.Random(0)
    wanted = RepetitionDetectionParams(max_pattern_size=1024, min_pattern_size=1, min_count=1000)

    def seconds(num_kinds: int) -> float:
        output = [*range(3000)]
        repetition = Repetition(wanted)
        repetition.ends(output, len(output))
        start = time.thread_time()
        for _ in range(200):
            output.append(numbers.randrange(num_kinds))
            repetition.ends(output, len(output))
        return time.thread_time() - start

    assert min(seconds(2) for _ in range(3)) < 5 * min(seconds(10**6) for _ in range(3))
