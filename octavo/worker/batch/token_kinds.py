"""Finds the tokens of a step that stand for images, for models with separate experts for these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.attention.metadata import TokenKinds
from octavo.worker.batch.packed_arrays import copy_to_device

if TYPE_CHECKING:
    from octavo.worker.batch.input_batch import BatchRow


def token_kinds(rows: Sequence[BatchRow], device: torch.device) -> TokenKinds | None:
    """Return the tokens of images, including the token before and the one after each image; None if a step has none."""
    is_seen = np.zeros(sum(row.scheduled.num_tokens for row in rows), dtype=np.bool_)
    first = 0
    for row in rows:
        start, end = row.scheduled.start, row.end
        for offset, height, width, *times in row.state.grids:
            begin, stop = offset - 1, offset + height * width * max(1, len(times)) + 1
            is_seen[first + max(begin, start) - start : first + max(start, min(stop, end)) - start] = True
        first += end - start
    if not is_seen.any():
        return None
    _, (images, others) = copy_to_device([np.flatnonzero(is_seen), np.flatnonzero(~is_seen)], device)
    return TokenKinds(images, others)
