"""Which tokens of a step are of images."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from octavo.worker.batch.token_kinds import token_kinds


def row(start: int, num_tokens: int, *grids: tuple[int, ...]) -> Any:
    scheduled = SimpleNamespace(start=start, num_tokens=num_tokens)
    return SimpleNamespace(scheduled=scheduled, end=start + num_tokens, state=SimpleNamespace(grids=grids))


def images(*rows: Any) -> list[int] | None:
    found = token_kinds(rows, torch.device("cpu"))
    if found is None:
        return None
    num_tokens = sum(each.scheduled.num_tokens for each in rows)
    assert sorted([*found.images.tolist(), *found.others.tolist()]) == list(range(num_tokens))
    return found.images.tolist()


def test_tokens_around_an_image_belong_to_it() -> None:
    assert images(row(0, 12, (3, 2, 2))) == [2, 3, 4, 5, 6, 7]
    assert images(row(0, 20, (1, 1, 2), (8, 2, 1, 0, 1))) == [0, 1, 2, 3, *range(7, 13)]


def test_a_row_has_what_is_cut_from_an_image() -> None:
    grid = (3, 2, 2)
    assert images(row(0, 3, grid)) == [2]
    assert images(row(4, 2, grid)) == [0, 1]
    assert images(row(7, 3, grid)) == [0]
    assert images(row(0, 2, grid), row(8, 1, grid)) is None


def test_rows_are_one_behind_the_other() -> None:
    assert images(row(5, 4), row(2, 2, (3, 2, 2)), row(0, 3, (9, 1, 1)), row(6, 2, (3, 2, 2))) == [4, 5, 9, 10]
