"""The state that the worker holds of a sequence: its line of tokens and blocks, and its sampling parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.media import MediaInput, View
from octavo.core.outputs import RequestError
from octavo.core.pooling import PooledPrompt
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import NewSequence
from octavo.devices.token_store import TokenStore
from octavo.worker.batch.block_table import BlockTables


@dataclass(slots=True, eq=False, weakref_slot=True)
class SequenceState:
    """`num_tokens` grows with tokens that are drawn or sent; everything else is fixed. Changed by the runner only."""

    line: int
    """Its line in the token store and in the block tables."""
    num_tokens: int
    """The number of tokens in the line that are known."""
    store: TokenStore
    seq_id: int
    epoch: int
    index: int
    params: SamplingParams
    num_prompt_tokens: int
    end_token_ids: tuple[int, ...]
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    adapter: int
    """Index of its adapter; 0 for none."""
    media: tuple[MediaInput, ...]
    """Images and sounds that its next rows read."""
    grids: tuple[tuple[int, ...], ...]
    """(offset, rows, columns) of images by which its tokens turn, and times of the frames of a video."""
    are_grids_apart: bool
    """Whether rows and columns count from 0 in each image, and positions in time continue."""
    whole_spans: tuple[tuple[int, int], ...]
    """(offset, length) of tokens that attend to each other."""
    views: tuple[View, ...]
    """Which vectors of encoders' outputs its tokens see, where layers read these through caches."""
    pooled: PooledPrompt | None
    """How the prompt becomes a vector; None for sequences that draw tokens."""
    is_drafted: bool
    """Whether the draft model computes its prompt too."""
    num_drafted: int | None = None
    """Leading tokens that the draft model has computed; None for those before the first row."""
    may_launch: bool | None = None
    """Whether its tokens can be drawn without waiting for the device; None until this is determined."""
    error: RequestError | None = None
    """Why no further token can be drawn; steps that were already planned return it again."""

    def first_tokens(self, count: int) -> NDArray[np.int32]:
        """Return the first `count` tokens of its line, a view; drafts may follow the known ones."""
        return self.store.read(self.line, count)

    def stored_tokens(self) -> Tensor:
        """Return the lines of all sequences, int32 [lines, width], on the device."""
        return self.store.on_device()


_stated = attrgetter(*(each.name for each in fields(SequenceState) if each.name in NewSequence.__struct_fields__))
"""Returns the values of a `NewSequence` for fields of `SequenceState`, in their order."""


class Sequences:
    """All sequences that the worker holds, by id, with their tokens and their block tables in each cache group."""

    def __init__(self, tokens: TokenStore, num_groups: int = 1) -> None:
        self.tokens = tokens
        self.tables = [BlockTables() for _ in range(num_groups)]
        self.num_adapted = 0
        """Sequences that use an adapter."""
        self.num_with_grids = 0
        """Sequences whose positions follow from images."""
        self.num_with_spans = 0
        """Sequences with tokens that attend to each other."""
        self.num_pairs = 0
        """Sequences that are pairs of texts whose tokens have types."""
        self.num_with_unseen = 0
        """Sequences that end with tokens that no token sees."""
        self._states: dict[int, SequenceState] = {}
        self._num_lines = 0
        self._free_lines: list[int] = []

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, seq_id: int) -> SequenceState:
        return self._states[seq_id]

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._states

    def has(self, state: SequenceState) -> bool:
        """Return whether this state is still held: after a preemption its sequence gets another one."""
        return self._states.get(state.seq_id) is state

    def unfinished_media(self) -> Iterator[MediaInput]:
        """Yield the media that rows to come still read."""
        return (each for state in self._states.values() for each in state.media)

    def add(self, new: NewSequence) -> None:
        """Add a sequence in place of one with the same id. A fork copies its shared tokens from its parent."""
        num_shared = new.num_shared_tokens
        line = self._acquire_line()
        if new.parent_id is not None:
            parent = self._states[new.parent_id]
            assert parent.num_tokens >= num_shared, "a fork shares tokens that its parent does not have"
            self.tokens.copy(parent.line, line, num_shared)
        self.tokens.write(line, num_shared, new.token_ids)
        for table, block_ids in zip(self.tables, new.block_tables, strict=True):
            table.write(line, 0, block_ids)
        self.drop(new.seq_id)
        num_tokens = num_shared + len(new.token_ids)
        self._states[new.seq_id] = SequenceState(line, num_tokens, self.tokens, *_stated(new))
        self.num_adapted += new.adapter != 0
        self.num_with_grids += bool(new.grids)
        self.num_with_spans += bool(new.whole_spans)
        if new.pooled is not None:
            self.num_pairs += new.pooled.second_start != 0
            self.num_with_unseen += new.pooled.num_unseen != 0

    def drop(self, seq_id: int) -> None:
        """Forget a sequence; unknown ids are ignored."""
        state = self._states.pop(seq_id, None)
        if state is not None:
            self.num_adapted -= state.adapter != 0
            self.num_with_grids -= bool(state.grids)
            self.num_with_spans -= bool(state.whole_spans)
            if state.pooled is not None:
                self.num_pairs -= state.pooled.second_start != 0
                self.num_with_unseen -= state.pooled.num_unseen != 0
            for table in self.tables:
                table.write(state.line, 0, ())
            self._free_lines.append(state.line)

    def _acquire_line(self) -> int:
        if self._free_lines:
            return self._free_lines.pop()
        self._num_lines += 1
        return self._num_lines - 1


def second_start(sequence: SequenceState) -> int:
    """Return where the second text of a pair begins, whose tokens have another type; 0 for no such pair."""
    return 0 if sequence.pooled is None else sequence.pooled.second_start
