"""The sampler on CUDA, its kernels interpreted: the reference's tokens, whoever is beside a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo.devices.cuda.draws import likeliest_tokens
from octavo.devices.cuda.kernels import sampling
from octavo.devices.cuda.runtime import CudaRuntime, Launcher, launch_by_triton
from octavo.devices.cuda.sampler import CudaSampler
from octavo.devices.reference.sampler import ReferenceSampler
from octavo.sampling.filters import Filter, default_filters
from octavo.sampling.processors import default_processors
from tests.conformance.test_sampling import KINDS, make_logits, rows_of, token_ids


def sampler(launch: Launcher = launch_by_triton, filters: Sequence[Filter] = ()) -> CudaSampler:
    runtime, device, every = CudaRuntime(launch=launch), torch.device("cpu"), (*default_filters(), *filters)
    return CudaSampler(runtime, device, lambda values: values.tolist, default_processors(), every)


@pytest.mark.parametrize(
    ("vocab_size", "kind"),
    # 2,501 are of several blocks
    [
        *((2501, kind) for kind in ("normal", "ties", "equal", "barred", "large")),
        (65, "ties"),
        (5, "normal"),
        (5, "barred"),
    ],
)
def test_tokens_are_those_of_the_reference(vocab_size: int, kind: str) -> None:
    logits = make_logits(kind, len(KINDS), vocab_size)
    expected = ReferenceSampler().sample(logits.clone(), rows_of(KINDS))
    found = sampler().sample(logits.clone(), rows_of(KINDS))
    assert [*map(token_ids, found)] == [*map(token_ids, expected)]
    assert sampler().sample(logits[7:9].clone(), rows_of(KINDS[7:9])) == found[7:9]


def test_drawn_tokens_are_described_by_what_they_were_drawn_from() -> None:
    kinds: list[dict[str, Any]] = [
        {"seed": 3, "temperature": 0.7, "top_k": 9, "logprobs": 12},
        {"temperature": 0.0, "allowed_token_ids": (3, 40), "logprobs": 3},
        {"seed": 4, "top_p": 0.6, "min_p": 0.01, "num_samples": 2, "presence_penalty": 0.5, "logprobs": 0},
    ]
    logits = make_logits("normal", 3, 700)
    drawn = [token_ids(each) for each in ReferenceSampler().sample(logits.clone(), rows_of(kinds))]
    expected = ReferenceSampler().describe_drawn(logits.clone(), rows_of(kinds), drawn)
    found = sampler().describe_drawn(logits.clone(), rows_of(kinds), drawn)
    for ours, theirs in zip(found, expected, strict=True):
        for token, other in zip(ours, theirs, strict=True):
            assert (token.token_id, token.rank, token.top_ids) == (other.token_id, other.rank, other.top_ids)
            assert [token.logprob, *token.top_logprobs] == pytest.approx([other.logprob, *other.top_logprobs], abs=1e-5)
    assert [len(each[0].top_ids) for each in found] == [9, 2, 0]


def test_many_draws_of_a_row_are_those_of_the_reference() -> None:
    kinds: list[dict[str, Any]] = [
        {"seed": 3, "num_samples": 21, "logprobs": 2},
        {"temperature": 0.0, "num_samples": 2},
        {"seed": 4, "top_p": 0.9, "num_samples": 18, "presence_penalty": 0.5, "logprobs": 0},
    ]
    logits = make_logits("normal", 3, 4099)
    expected = ReferenceSampler().sample(logits.clone(), rows_of(kinds))
    found = sampler().sample(logits.clone(), rows_of(kinds))
    assert [*map(token_ids, found)] == [*map(token_ids, expected)]
    assert len(set(token_ids(found[0]))) > 10
    for place, kind in enumerate(kinds):
        assert sampler().sample(logits[place : place + 1].clone(), rows_of([kind])) == [found[place]]
        if "logprobs" in kind:
            chosen = token_ids(found[place])
            described = sampler().describe(logits[place].repeat(len(chosen), 1), chosen, kind["logprobs"])
            assert described == found[place].tokens


def test_tokens_that_are_barred_are_never_drawn() -> None:
    one = torch.full((1, 9000), -math.inf)
    one[0, 8999] = -60.0
    assert token_ids(sampler().sample(one, rows_of([{"seed": 3, "num_samples": 2}]))[0]) == [8999, 8999]


def test_a_row_of_several_samples_of_which_nothing_can_be_drawn_gets_one_error() -> None:
    kinds = [{"seed": 1, "num_samples": 3}, {"seed": 2}, {"seed": 3, "num_samples": 2}]
    logits = make_logits("normal", 3, 70)
    logits[0, 9] = math.nan
    found = sampler().sample(logits, rows_of(kinds))
    assert [(len(each.tokens), each.error is None) for each in found] == [(0, False), (1, True), (2, True)]


@pytest.mark.parametrize("is_rougher", [False, True])
def test_many_launched_draws_are_those_of_the_reference(is_rougher: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_rougher:  # then many tokens of a block are computed exactly
        monkeypatch.setattr(sampling, "_ROUGHLY", 0.3)
    kinds = [{"seed": seed, "temperature": (0.01, 0.7, 1.0, 3.0, 50.0)[seed % 5]} for seed in range(40)]
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(40, 4099)) * 2).float()
    found = sampler().launch(logits, rows_of(kinds))
    assert found.wait() == ReferenceSampler().sample(logits.clone(), rows_of(kinds))
    assert len(set(found.token_ids.tolist())) > 25


def test_the_likeliest_token_is_the_first_as_torch_has_it() -> None:
    logits = torch.randn(7, 4500, generator=torch.Generator().manual_seed(0)).mul(4).round()
    logits[1], logits[2, 4444], logits[3, 4499], logits[4, 4498] = -math.inf, math.nan, math.inf, -math.nan
    logits[5] = torch.tensor([-0.0, 0.0]).repeat(2250)
    found = likeliest_tokens(logits, launch_by_triton)
    torch.testing.assert_close(found.largest, logits.amax(dim=-1), rtol=0, atol=0, equal_nan=True)
    assert found.token_ids.tolist() == logits.argmax(dim=-1).tolist()
