"""What the worker remembers of a sequence: its tokens, how it samples, where its block table is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.outputs import RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import NewSequence
from octavo.worker.block_table import BlockTables


@dataclass(slots=True, eq=False, weakref_slot=True)
class SequenceState:
    """Tokens grow with what is sampled; everything else is fixed. Changed by `Sequences` and the runner only."""

    seq_id: int
    epoch: int
    index: int
    params: SamplingParams
    num_prompt_tokens: int
    end_token_ids: tuple[int, ...]
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    table_line: int
    token_buffer: NDArray[np.int64]
    """The first `num_tokens` entries are the tokens; the rest is room to grow."""
    num_tokens: int
    error: RequestError | None = None
    """Why no further token can come: steps that were already planned repeat it."""

    @property
    def known_tokens(self) -> NDArray[np.int64]:
        """[num_tokens]: prompt and output so far, a view."""
        return self.token_buffer[: self.num_tokens]

    def append(self, token_id: int) -> None:
        """Add a sampled token."""
        if self.num_tokens == len(self.token_buffer):
            self.token_buffer = np.concatenate((self.token_buffer, np.empty_like(self.token_buffer)))
        self.token_buffer[self.num_tokens] = token_id
        self.num_tokens += 1


class Sequences:
    """All sequences that the worker holds, by id, and their block tables."""

    def __init__(self) -> None:
        self.tables = BlockTables()
        self._states: dict[int, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, seq_id: int) -> SequenceState:
        return self._states[seq_id]

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._states

    def add(self, new: NewSequence) -> None:
        """Take a sequence in, in place of one with the same id. A fork copies its shared tokens from its parent."""
        shared = self._states[new.parent_id].known_tokens if new.parent_id is not None else np.empty(0, dtype=np.int64)
        assert len(shared) >= new.num_shared_tokens, "a fork shares tokens that its parent does not have"
        num_tokens = new.num_shared_tokens + len(new.token_ids)
        # room for some output, so that short answers never copy
        token_buffer = np.empty(num_tokens + min(new.params.max_tokens or 16, 256), dtype=np.int64)
        token_buffer[: new.num_shared_tokens] = shared[: new.num_shared_tokens]
        token_buffer[new.num_shared_tokens : num_tokens] = new.token_ids
        self.drop(new.seq_id)
        self._states[new.seq_id] = SequenceState(
            seq_id=new.seq_id,
            epoch=new.epoch,
            index=new.index,
            params=new.params,
            num_prompt_tokens=new.num_prompt_tokens,
            end_token_ids=new.end_token_ids,
            bad_words_token_ids=new.bad_words_token_ids,
            table_line=self.tables.acquire(new.block_ids),
            token_buffer=token_buffer,
            num_tokens=num_tokens,
        )

    def drop(self, seq_id: int) -> None:
        """Forget a sequence; unknown ids are passed over."""
        state = self._states.pop(seq_id, None)
        if state is not None:
            self.tables.release(state.table_line)
