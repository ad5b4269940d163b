"""Positions of tokens around and within images, whole and cut."""

from __future__ import annotations

import numpy as np

from octavo.worker.batch.rope_positions import _of_row, _of_row_apart

GRIDS = ((2, 2, 3), (9, 3, 1))
"""Six tokens from the third on, in two rows of three; then one of text, and three rows of one."""
EXPECTED = [
    [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 6, 9, 10],
    [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10],
    [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 6, 9, 10],
]


def test_images_stand_at_one_time_and_text_goes_on_behind_the_larger_side() -> None:
    assert _of_row(GRIDS, 0, 14).positions[:3].tolist() == EXPECTED


def test_a_part_of_a_prompt_has_the_same_positions() -> None:
    for start in range(14):
        for end in range(start + 1, 15):
            found = _of_row(GRIDS, start, end - start)
            assert (found.positions[:3] == np.array(EXPECTED)[:, start:end]).all()
            assert found.has_images == any(start < stop and first < end for first, stop in ((2, 8), (9, 12)))


def test_frames_of_one_span_stand_at_their_times_and_text_goes_on_behind_the_last() -> None:
    expected = [[0, 1, 1, 4, 4, 7, 7, 8], [0, 1, 1, 1, 1, 1, 1, 8], [0, 1, 2, 1, 2, 1, 2, 8]]
    grid = (1, 1, 2, 0, 3, 6)
    assert _of_row((grid,), 0, 8).positions[:3].tolist() == expected
    for start in range(8):
        assert _of_row((grid,), start, 8 - start).positions[:3].tolist() == [each[start:] for each in expected]


def test_images_apart_have_rows_and_columns_from_zero_and_a_number() -> None:
    """Two rows of two from the fourth token on, then three of text, and one row of two; each between two vectors."""
    grids, expected = ((2, 2, 2), (10, 1, 2)), np.repeat(np.arange(15)[None], 4, 0)
    expected[1:, 3:7] = [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]]
    expected[1:, 11:13] = [[0, 0], [0, 1], [1, 1]]
    for start in range(15):
        for end in range(start + 1, 16):
            found = _of_row_apart(grids, start, end - start)
            assert (found.positions == expected[:, start:end]).all()
            assert found.has_images == any(start < stop and first < end for first, stop in ((3, 7), (11, 13)))
