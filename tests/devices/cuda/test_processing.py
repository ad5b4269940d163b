"""Logits processors without the host, their kernels interpreted: the reference's bits, whoever is beside a row."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo.core.sampling_params import SamplingParams
from octavo.devices.cuda.processing import LAUNCHED, apply
from octavo.devices.cuda.runtime import launch_by_triton
from octavo.devices.reference.sampler import ReferenceSampler
from octavo.sampling.processors import LogitsProcessor, ProcessedRow, default_processors
from tests.conformance.test_sampling import make_logits
from tests.devices.cuda.test_sampler import sampler
from tests.sampling.sequences import FakeSequence

VOCAB_SIZE = 1500
WORDS = ((3,), (5, 6), (1, 2, 9), (7, 7, 7), (), (2, 5, 8))
ASKED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "temperature": 0.0},
    {"presence_penalty": -1.1, "logprobs": 2},
    {"repetition_penalty": 0.77, "frequency_penalty": -0.31, "presence_penalty": 0.53, "top_k": 9},
    {"bad_words": ("x",)},
    {"logit_bias": {0: 3.3, 5: -100.0, 1499: 100.0}, "logprobs": 3},
    {"allowed_token_ids": (4, 0, 2, 2, 1499), "min_tokens": 3, "top_p": 0.9},
    {"min_tokens": 400, "bad_words": ("x",), "frequency_penalty": 0.1, "logprobs": 0},
    {},
]


def sequences() -> list[FakeSequence]:
    """Sequences whose tokens come again, of which some end where bad words would be completed."""
    made = []
    for place, asked in enumerate(ASKED):
        chosen = random.Random(place)
        prompt, output = (
            [chosen.choice((1, 2, 5, 7, chosen.randrange(VOCAB_SIZE))) for _ in range(count)]
            for count in (1 + 150 * (place % 3), 600 * (place % 2))
        )
        output += [[], [1, 2], [7, 7], [5], [2]][place % 5]
        words = WORDS if "bad_words" in asked else ()
        made.append(FakeSequence(SamplingParams(seed=place, max_tokens=999, **asked), prompt, output, 0, (6, 7), words))
    return made


def applied(processor: LogitsProcessor, rows: list[ProcessedRow], logits: torch.Tensor) -> torch.Tensor:
    logits = logits.clone()
    apply(processor, rows, logits, launch_by_triton)
    return logits


@pytest.mark.parametrize("kind", ["normal", "barred", "large"])
def test_logits_have_the_bits_of_the_reference(kind: str) -> None:
    made = sequences()
    logits = make_logits(kind, len(made), VOCAB_SIZE)
    for processor in default_processors():
        assert isinstance(processor, LAUNCHED)
        rows = [ProcessedRow(place, each.row()) for place, each in enumerate(made) if processor.needs(each.params)]
        assert rows
        expected = logits.clone()
        processor.update(rows)
        processor.apply(expected)
        assert kind != "normal" or not torch.equal(expected, logits)
        assert torch.equal(applied(processor, rows, logits), expected), processor.name
        for row in rows:
            assert torch.equal(applied(processor, [row], logits)[row.row], expected[row.row])


def test_rows_are_drawn_as_by_the_reference_and_described_by_the_model() -> None:
    made = sequences()
    logits = make_logits("normal", len(made), VOCAB_SIZE)
    rows = [each.row() for each in made]
    expected = ReferenceSampler().sample(logits.clone(), rows)
    found = sampler().launch(logits.clone(), rows).wait()
    assert [[token.token_id for token in each.tokens] for each in found] == [
        [token.token_id for token in each.tokens] for each in expected
    ]
    for place, (one, row) in enumerate(zip(found, rows, strict=True)):
        assert sampler().launch(logits[place : place + 1].clone(), [row]).wait() == [one]
        if row.sequence.params.logprobs is not None:
            ids = [one.tokens[0].token_id]
            count = row.sequence.params.logprobs
            assert sampler().describe(logits[place : place + 1], ids, count) == one.tokens


class UnknownToHost(FakeSequence):
    def first_tokens(self, count: int) -> Any:
        raise AssertionError("the host may not know these tokens yet")


def test_tokens_that_the_host_does_not_know_yet_count() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=0.75, bad_words=("x",))
    sequence = UnknownToHost(params, [1], [0, 2, 0], bad_words_token_ids=((2, 0, 1), (1, 3)))
    logits = torch.zeros(1, 4)
    (found,) = sampler().launch(logits, [sequence.row()]).wait()
    assert logits.tolist() == [[-1.5, -math.inf, -0.75, 0.0]]
    assert found.tokens[0].token_id == 3


def test_rows_whose_tokens_are_all_barred_or_overflow_get_the_errors_of_the_reference() -> None:
    kinds: list[dict[str, Any]] = [
        {"allowed_token_ids": (4,), "bad_words": ("x",), "seed": 1},
        {"repetition_penalty": 1.5, "temperature": 0.0},
        {"logit_bias": {2: 5.0}, "temperature": 0.0},
    ]
    made = [FakeSequence(SamplingParams(**kind), [1], [4], bad_words_token_ids=((4,),)) for kind in kinds]
    logits = make_logits("normal", 3, 9)
    logits[1, 4] = math.inf
    rows = [each.row() for each in made]
    assert sampler().launch(logits.clone(), rows).wait() == ReferenceSampler().sample(logits.clone(), rows)


class Form:
    """Admits every third token, and the last one; every token where a draft may not be there."""

    name = "form"

    def needs(self, params: SamplingParams) -> bool:
        return params.seed is not None

    def update(self, rows: Any) -> None:
        self.rows = rows

    def mask(self, row: Any) -> Any:
        bits = np.zeros(1536, dtype=bool)
        bits[row.sequence.params.seed : 1480 : 3] = True
        bits[VOCAB_SIZE - 1] = True
        return None if row.num_drafts else np.packbits(bits[:-32], bitorder="little").view(np.uint32)

    def apply(self, logits: Any) -> None:
        for each in self.rows:
            mask = self.mask(each.sampling)
            if mask is not None:
                bits = np.unpackbits(mask.view(np.uint8), count=VOCAB_SIZE, bitorder="little")
                logits[each.row, torch.from_numpy(bits == 0)] = -math.inf


def test_rows_of_forms_are_drawn_as_by_the_reference() -> None:
    kinds: list[dict[str, Any]] = [{"seed": 1}, {"temperature": 0.0}, {"seed": 2, "top_p": 0.9, "min_tokens": 3}]
    made = [FakeSequence(SamplingParams(**kind), [1], [4], end_token_ids=(2, 5)) for kind in [*kinds, {"seed": 0}]]
    rows = [each.row() for each in made]
    rows[3] = msgspec.structs.replace(rows[3], num_drafts=1)
    logits = make_logits("normal", len(rows), VOCAB_SIZE)
    own, processors = sampler(), (*default_processors(), Form())
    own._processors = processors
    found = own.sample(logits.clone(), rows)
    assert found == ReferenceSampler(processors).sample(logits.clone(), rows)
    assert found[0].tokens[0].token_id % 3 == 1
    changed = logits.clone()
    own.sample(changed, rows)
    for place, bars in ((0, True), (1, False), (3, False)):
        assert changed[place].isinf().any() == bars
    assert own.sample(logits[2:3].clone(), rows[2:3]) == found[2:3]


def test_which_rows_wait_for_the_host() -> None:
    own = sampler()
    assert all(own.may_launch(each.params) for each in sequences())

    class Another:
        name = "another"

        def needs(self, params: SamplingParams) -> bool:
            return params.top_k == 3

        def update(self, rows: Any) -> None: ...

        def apply(self, logits: Any) -> None: ...

    own._processors = (Another(), *own._processors)
    assert own.may_launch(SamplingParams(top_k=2, presence_penalty=1.0))
    assert not own.may_launch(SamplingParams(top_k=3))
