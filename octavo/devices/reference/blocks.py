"""Copies of KV blocks by torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from octavo.core.step import BlockCopy


def copy_blocks(sources: Sequence[Tensor], targets: Sequence[Tensor], copies: Sequence[BlockCopy]) -> None:
    """Copy blocks between the caches of each layer, blocks in dimension 1, in the order of `copies`."""
    if not sources:  # no layer has such blocks
        return
    for group in _independent(copies):
        source_ids = torch.tensor([copy.source for copy in group]).to(sources[0].device, non_blocking=True)
        target_ids = torch.tensor([copy.target for copy in group]).to(targets[0].device, non_blocking=True)
        for source, target in zip(sources, targets, strict=True):
            # not index_select, which copies all of a source whose blocks are apart
            target.index_copy_(1, target_ids, source[:, source_ids].to(target.device))


def _independent(copies: Sequence[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """Cut a list where a copy reads or overwrites what an earlier one of the same group has written."""
    group: list[BlockCopy] = []
    written: set[int] = set()
    for copy in copies:
        if copy.source in written or copy.target in written:
            yield group
            group, written = [], set()
        group.append(copy)
        written.add(copy.target)
    if group:
        yield group
