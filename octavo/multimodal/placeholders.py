"""The tokens of a prompt that stand for what came with it."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import groupby
from typing import Any

from octavo.errors import InvalidRequest


def matched(
    kind: str, marker: int, token_ids: Sequence[int], brought: Sequence[Any], limit: int, room: int | None = None
) -> Iterator[Any]:
    """Return what the markers of a kind stand for. room: the most that a model has room for, None for any number.

    Raises InvalidRequest for another number of them.
    """
    num_markers = sum(each == marker for each in token_ids)
    if len(brought) != num_markers:
        raise InvalidRequest(
            f"the prompt has {_count(num_markers, 'placeholder')} for {kind}s, but {_count(len(brought), kind)} "
            f"came with it; write one placeholder for each {kind}",
            field="multi_modal_data",
        )
    if len(brought) > limit:
        raise InvalidRequest(
            f"the prompt has {len(brought)} {kind}s, must have at most {limit} (limit_mm_per_prompt)",
            field="multi_modal_data",
        )
    if room is not None and len(brought) > room:
        raise InvalidRequest(
            f"the prompt has {len(brought)} {kind}s, must have at most {room} (this model has room for no more)",
            field="multi_modal_data",
        )
    return iter(brought)


def spans_of(tokens: Sequence[int], those: Container[int], offset: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of the runs of `those` tokens."""
    for is_token, run in groupby(tokens, lambda each: each in those):
        length = sum(1 for _ in run)
        if is_token:
            yield offset, length
        offset += length


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + "s" * (number != 1)
