"""What allowed_token_ids, bad_words, min_tokens and logit_bias do to logits."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.core.sampling_params import SamplingParams
from octavo.sampling.processors import AllowedTokenIds, BadWords, LogitBias, LogitsProcessor, MinTokens, ProcessedRow
from tests.sampling.sequences import FakeSequence


def processed(processor: LogitsProcessor, *sequences: FakeSequence, vocab_size: int = 8) -> torch.Tensor:
    assert all(processor.needs(sequence.params) for sequence in sequences)
    # row 0 belongs to nobody who asked: it must stay as it is
    processor.update([ProcessedRow(row + 1, sequence.row()) for row, sequence in enumerate(sequences)])
    logits = torch.arange(vocab_size, dtype=torch.float32).repeat(len(sequences) + 1, 1)
    processor.apply(logits)
    assert logits[0].tolist() == list(range(vocab_size))
    return logits[1:]


def barred(processor: LogitsProcessor, sequence: FakeSequence) -> list[int]:
    return (processed(processor, sequence)[0] == -math.inf).nonzero().flatten().tolist()


@pytest.mark.parametrize("processor", [AllowedTokenIds(), BadWords(), LogitBias(), MinTokens()])
def test_plain_requests_need_none_of_them(processor: LogitsProcessor) -> None:
    assert not processor.needs(SamplingParams())


def test_only_allowed_tokens_keep_their_logits() -> None:
    logits = processed(AllowedTokenIds(), FakeSequence(SamplingParams(allowed_token_ids=(2, 5))))
    assert logits[0].tolist() == [-math.inf, -math.inf, 2, -math.inf, -math.inf, 5, -math.inf, -math.inf]


def test_logit_bias_is_added() -> None:
    first = FakeSequence(SamplingParams(logit_bias={1: 2.5, 3: -100}))
    second = FakeSequence(SamplingParams(logit_bias={0: 1.0}))
    logits = processed(LogitBias(), first, second)
    assert logits[0].tolist() == [0, 3.5, 2, -97, 4, 5, 6, 7]
    assert logits[1].tolist() == [1, 1, 2, 3, 4, 5, 6, 7]


def test_an_id_outside_the_vocabulary_never_hits_another_row() -> None:
    with pytest.raises(IndexError):
        processed(LogitBias(), FakeSequence(SamplingParams(logit_bias={8: 1.0})), vocab_size=8)


@pytest.mark.parametrize(("num_output", "expected"), [(0, [6, 7]), (2, [6, 7]), (3, []), (4, [])])
def test_end_tokens_are_barred_until_min_tokens_are_there(num_output: int, expected: list[int]) -> None:
    params = SamplingParams(min_tokens=3, max_tokens=9)
    sequence = FakeSequence(params, [1, 2], [5] * num_output, end_token_ids=(6, 7))
    assert barred(MinTokens(), sequence) == expected


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ([0], [], [4]),
        ([0], [1], [2, 4]),
        ([0], [1, 2], [3, 4]),
        ([0], [2, 1], [2, 4]),
        ([0], [5, 1, 2], [3, 4]),
        # words that begin in the prompt are the caller's own
        ([1], [], [4]),
        ([1], [2], [4]),
    ],
)
def test_the_last_token_of_a_bad_word_is_barred(prompt: list[int], output: list[int], expected: list[int]) -> None:
    words = ((4,), (1, 2), (1, 2, 3))
    sequence = FakeSequence(SamplingParams(bad_words=("x",)), prompt, output, bad_words_token_ids=words)
    assert barred(BadWords(), sequence) == expected
