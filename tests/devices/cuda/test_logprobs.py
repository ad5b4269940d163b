"""Log-probabilities made where the logits are, their kernel interpreted: rounded once, whoever is beside a row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo.devices.reference.sampler import ReferenceSampler
from octavo.sampling.metadata import RowSamples
from tests.conformance.test_sampling import make_logits, rows_of
from tests.devices.cuda.test_sampler import sampler

DESCRIBED: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"seed": 1},
    {"seed": 2, "logprobs": 0},
    {"seed": 3, "temperature": 0.6, "logprobs": 20},
    {"seed": 4, "top_k": 5, "logprobs": 1},
    {"seed": 5, "best_of": 2},
    {"seed": 6, "temperature": 30.0, "logprobs": 40_000},
]


def found_in(logits: torch.Tensor, expected: RowSamples, count: int | None) -> RowSamples:
    """Return what is to be found beside the token drawn by the reference, computed in float64."""
    exact = torch.log_softmax(logits.double(), -1).float()
    (token,) = expected.tokens
    likeliest = logits.argsort(descending=True, stable=True)[:count]
    kept: dict[str, Any] = {"token_id": token.token_id, "logprob": exact[token.token_id].item()}
    if count is not None:
        kept["rank"] = int((logits > logits[token.token_id]).sum()) + 1
        kept |= {"top_ids": tuple(likeliest.tolist()), "top_logprobs": tuple(exact[likeliest].tolist())}
    return RowSamples([type(token)(**kept)])


@pytest.mark.parametrize(
    ("vocab_size", "kind"), [(5, "ties"), *((2100, kind) for kind in ("normal", "ties", "equal", "barred", "large"))]
)
def test_log_probabilities_are_those_of_float64_rounded_once(vocab_size: int, kind: str) -> None:
    logits = make_logits(kind, len(DESCRIBED), vocab_size)
    expected = ReferenceSampler().sample(logits.clone(), rows_of(DESCRIBED))
    found = sampler().launch(logits, rows_of(DESCRIBED)).wait()
    for place, (one, other, asked) in enumerate(zip(found, expected, DESCRIBED, strict=True)):
        if other.tokens[0].logprob is None:
            assert one == other
        else:
            assert one == found_in(logits[place], other, asked.get("logprobs"))


def test_a_row_is_described_alike_alone_and_in_steps_that_wait_and_by_its_token() -> None:
    logits = make_logits("normal", len(DESCRIBED), 1500)
    logits[0, :4] = torch.tensor([0.0, -0.0, -0.0, 0.0])
    together = sampler().launch(logits, rows_of(DESCRIBED)).wait()
    for place, kind in enumerate(DESCRIBED):
        alone, kinds = logits[place : place + 1], [kind | {"num_samples": 2}]
        assert sampler().launch(alone, rows_of([kind])).wait() == [together[place]]
        # several samples of a row wait for the host; the first is that of the row
        assert sampler().sample(alone.clone(), rows_of(kinds))[0].tokens[0] == together[place].tokens[0]
        count = kind.get("logprobs")
        if count is not None:
            (token,) = together[place].tokens
            assert sampler().describe(alone, [token.token_id], count) == [token]


def test_logits_that_are_no_numbers_are_told_from_those_that_are() -> None:
    logits = make_logits("normal", 5, 1030)
    kinds = [{"seed": seed, "logprobs": 2, "top_k": 3} for seed in range(5)]
    sound = sampler().launch(logits, rows_of(kinds)).wait()
    logits[0, 3], logits[2, 1029], logits[3] = math.nan, math.inf, -math.inf
    found = sampler().launch(logits, rows_of(kinds)).wait()
    assert [each.error is None for each in found] == [False, True, False, False, True]
    assert [found[1], found[4]] == [sound[1], sound[4]]
    described = sampler().describe(logits, [7] * 5, 2)
    assert [math.isnan(each.logprob or 0) for each in described] == [True, False, True, True, False]
