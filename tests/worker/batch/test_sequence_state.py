from __future__ import annotations

import gc
import weakref

import numpy as np

from octavo.devices.token_store import HostTokenStore
from octavo.worker.batch.sequence_state import Sequences
from tests.worker.prefix_model import new_sequence


def tokens_of(sequences: Sequences, seq_id: int) -> list[int]:
    state = sequences[seq_id]
    return state.first_tokens(state.num_tokens).tolist()


def test_a_fork_copies_the_shared_tokens_of_its_parent() -> None:
    sequences = Sequences(HostTokenStore())
    sequences.add(new_sequence(1, [4, 5, 6], [1]))
    sequences.add(new_sequence(2, [9], [2], parent_id=1, num_shared_tokens=2, index=1))
    assert tokens_of(sequences, 1) == [4, 5, 6]
    assert tokens_of(sequences, 2) == [4, 5, 9]


def test_the_line_of_a_dropped_sequence_is_used_again() -> None:
    sequences = Sequences(HostTokenStore())
    sequences.add(new_sequence(1, [4, 5, 6], [1, 2]))
    line = sequences[1].line
    sequences.add(new_sequence(2, [7], [3]))
    sequences.drop(1)
    sequences.add(new_sequence(3, [8], [4]))
    assert sequences[3].line == line != sequences[2].line
    assert tokens_of(sequences, 3) == [8]
    assert sequences.tables[0].blocks_at(np.full(2, line), np.arange(2)).tolist() == [4, 0]


def test_the_same_id_again_is_a_new_state_with_the_new_table() -> None:
    sequences = Sequences(HostTokenStore())
    sequences.add(new_sequence(1, [1, 2], [3, 4]))
    old = sequences[1]
    sequences.add(new_sequence(1, [1, 2, 3], [7], epoch=1))
    assert sequences[1] is not old
    assert len(sequences) == 1
    assert sequences.tables[0].blocks_at(np.full(2, sequences[1].line), np.arange(2)).tolist() == [7, 0]


def test_a_dropped_state_is_not_kept_alive() -> None:
    sequences = Sequences(HostTokenStore())
    sequences.add(new_sequence(1, [1], [1]))
    gone = weakref.ref(sequences[1])
    sequences.drop(1)
    sequences.drop(1)
    gc.collect()
    assert gone() is None
    assert 1 not in sequences
