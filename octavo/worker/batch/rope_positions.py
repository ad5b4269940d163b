"""Positions of prompts with images, for models that rotate heads by the rows and columns of an image (M-RoPE).

An image has one position in time, and its vectors have that position plus their rows and columns; frames of a video in
one span have several positions in time. The text after it continues behind the largest of all.
Source: https://arxiv.org/abs/2409.12191.

If images are apart (`are_grids_apart`), each has rows and columns from 0 and its index among the prompt's images, and
positions in time go on in it as in text. Source: Tencent's release of HunyuanOCR.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from octavo.worker.batch.input_batch import BatchRow


class RopePositions(NamedTuple):
    """positions: int64 [4, tokens], in time, rows, columns and among images. has_images: they differ for some token."""

    positions: NDArray[np.int64]
    has_images: bool


def rope_positions(rows: Sequence[BatchRow]) -> RopePositions:
    """Return the positions of all tokens of a step."""
    parts = [
        (_of_row_apart if state.are_grids_apart else _of_row)(state.grids, scheduled.start, scheduled.num_tokens)
        for scheduled, state in rows
    ]
    return RopePositions(np.concatenate([each.positions for each in parts], 1), any(each.has_images for each in parts))


def _of_row_apart(grids: Sequence[tuple[int, ...]], start: int, num_tokens: int) -> RopePositions:
    end, has_images = start + num_tokens, False
    positions = np.repeat(np.arange(start, end, dtype=np.int64)[None], 4, 0)
    for number, (around, height, width) in enumerate(grids):
        offset = around + 1
        first, stop = max(offset, start), min(offset + height * width, end)
        if first < stop:
            has_images = True
            inside = np.arange(first, stop) - offset
            places = [inside // width, inside % width, np.full_like(inside, number)]
            positions[1:, first - start : stop - start] = places
    return RopePositions(positions, has_images)


def _of_row(grids: Sequence[tuple[int, ...]], start: int, num_tokens: int) -> RopePositions:
    end, saved, has_images = start + num_tokens, 0, False
    positions = np.repeat(np.arange(start, end, dtype=np.int64)[None], 4, 0)
    for offset, height, width, *times in grids:
        size = height * width
        stop = offset + size * max(1, len(times))
        if offset >= end:
            break
        begin = offset - saved
        saved += stop - offset - max(height, width, *(time + 1 for time in times))
        positions[:, max(0, stop - start) :] = np.arange(max(start, stop), end) - saved
        inside = np.arange(max(offset, start), min(stop, end)) - offset
        if len(inside):
            has_images = True
            places = slice(max(offset, start) - start, min(stop, end) - start)
            in_time = np.array(times or (0,), dtype=np.int64)[inside // size]
            positions[:3, places] = begin + np.stack([in_time, inside % size // width, inside % width])
    return RopePositions(positions, has_images)
