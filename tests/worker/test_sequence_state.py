from __future__ import annotations

import gc
import weakref

import numpy as np

from octavo.core.sampling_params import SamplingParams
from octavo.worker.sequence_state import Sequences
from tests.worker.prefix_model import new_sequence


def test_a_fork_copies_the_shared_tokens_of_its_parent_and_grows_alone() -> None:
    sequences = Sequences()
    sequences.add(new_sequence(1, [4, 5, 6], [1]))
    sequences[1].append(7)
    sequences.add(new_sequence(2, [9], [2], parent_id=1, num_shared_tokens=3, index=1))
    sequences[2].append(10)
    assert sequences[1].known_tokens.tolist() == [4, 5, 6, 7]
    assert sequences[2].known_tokens.tolist() == [4, 5, 6, 9, 10]


def test_tokens_grow_beyond_their_first_room() -> None:
    sequences = Sequences()
    sequences.add(new_sequence(1, [1], [1], params=SamplingParams(max_tokens=2)))
    for token in range(100):
        sequences[1].append(token)
    assert sequences[1].known_tokens.tolist() == [1, *range(100)]


def test_the_same_id_again_is_a_new_state_with_the_new_table() -> None:
    sequences = Sequences()
    sequences.add(new_sequence(1, [1, 2], [3, 4]))
    old = sequences[1]
    sequences.add(new_sequence(1, [1, 2, 3], [7], epoch=1))
    assert sequences[1] is not old
    assert len(sequences) == 1
    assert sequences.tables.blocks_at(np.full(2, sequences[1].table_line), np.arange(2)).tolist() == [7, 0]


def test_a_dropped_state_is_not_kept_alive() -> None:
    sequences = Sequences()
    sequences.add(new_sequence(1, [1], [1]))
    gone = weakref.ref(sequences[1])
    sequences.drop(1)
    sequences.drop(1)
    gc.collect()
    assert gone() is None
    assert 1 not in sequences
