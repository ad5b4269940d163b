"""Where an output is cut into pieces, and where the next window begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.core.speech import SpeechTokens
from octavo.multimodal.transcripts import Piece, compression_ratio, cut_pieces

END, STAMP = 30, 40
TOKENS = SpeechTokens(start=31, end=END, no_timestamps=39)


def stamp(hundredths: int) -> int:
    return STAMP + hundredths // 2


CASES: dict[str, tuple[list[int], list[Piece], float]] = {
    "two pieces, and a third that is heard again": (
        [stamp(0), 1, 2, stamp(20), stamp(20), 3, stamp(50), stamp(50), 4],
        [Piece(0.0, 0.2, [1, 2]), Piece(0.2, 0.5, [3])],
        0.5,
    ),
    "one timestamp at the end": (
        [stamp(0), 1, stamp(20), stamp(26), 3, stamp(50), END],
        [Piece(0.0, 0.2, [1]), Piece(0.26, 0.5, [3])],
        1.0,
    ),
    "no pair": ([stamp(0), 1, 2, stamp(40), END], [Piece(0.0, 0.4, [1, 2])], 1.0),
    "no timestamp": ([1, 2, END], [Piece(0.0, 1.0, [1, 2])], 1.0),
    "nothing": ([END], [Piece(0.0, 1.0, [])], 1.0),
}


@pytest.mark.parametrize(("ids", "pieces", "step"), CASES.values(), ids=CASES.keys())
def test_outputs_are_cut_behind_pairs_of_timestamps(ids: list[int], pieces: list[Piece], step: float) -> None:
    found, seconds = cut_pieces(ids, TOKENS, 1.0)
    assert [(round(each.start, 3), round(each.end, 3), each.token_ids) for each in found] == pieces
    assert round(seconds, 3) == step


@pytest.mark.parametrize("ids", [case[0] for case in CASES.values() if case[0] != [END]])
def test_pieces_and_steps_are_those_of_transformers(ids: list[int]) -> None:
    from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

    mixin: Any = WhisperGenerationMixin
    kept = [each for each in ids if each != END]
    segments, offset = mixin._retrieve_segment(
        seek_sequence=torch.tensor(kept), seek_outputs=[None], time_offset=torch.tensor([0.0], dtype=torch.float64),
        timestamp_begin=STAMP, seek_num_frames=torch.tensor([100]), time_precision=0.02, time_precision_features=0.01,
        input_stride=2, prev_idx=0, idx=0, return_token_timestamps=False, decoder_input_ids=torch.zeros(1, 3),
    )  # fmt: skip
    pieces, seconds = cut_pieces(ids, TOKENS, 1.0)
    assert [(round(p.start, 3), round(p.end, 3)) for p in pieces] == [
        (round(float(each["start"]), 3), round(float(each["end"]), 3)) for each in segments
    ]
    assert round(seconds * 100) == int(offset)


def test_a_text_that_repeats_itself_is_compressed() -> None:
    assert compression_ratio("la " * 200) > 2.4 > compression_ratio("He has grave doubts whether it is Greek.")
