"""The sampler on CUDA, its race interpreted: the reference's tokens, whoever is beside a row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo.devices.cuda.draws import likeliest_tokens
from octavo.devices.cuda.kernels import sampling
from octavo.devices.cuda.launch import Launcher, launch_by_triton
from octavo.devices.cuda.runtime import CudaRuntime
from octavo.devices.cuda.sampler import CudaSampler
from octavo.devices.reference.sampler import ReferenceSampler
from octavo.sampling.filters import default_filters
from octavo.sampling.processors import default_processors
from octavo.sampling.random import race
from tests.conformance.test_sampling import KINDS, make_logits, rows_of, token_ids


def sampler(launch: Launcher = launch_by_triton) -> CudaSampler:
    processors, filters = default_processors(), default_filters()
    return CudaSampler(
        CudaRuntime(launch=launch), torch.device("cpu"), lambda values: values.tolist, processors, filters
    )


@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "barred", "large"])
@pytest.mark.parametrize("vocab_size", [5, 65, 2501])
def test_tokens_are_those_of_the_reference(vocab_size: int, kind: str) -> None:
    logits = make_logits(kind, len(KINDS), vocab_size)
    expected = ReferenceSampler().sample(logits.clone(), rows_of(KINDS))
    found = sampler().sample(logits.clone(), rows_of(KINDS))
    assert [*map(token_ids, found)] == [*map(token_ids, expected)]
    assert sampler().sample(logits[7:9].clone(), rows_of(KINDS[7:9])) == found[7:9]


def test_many_draws_are_those_of_the_reference_and_of_float64() -> None:
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 1 << 32, (200, 2), dtype=np.uint32)
    weights = torch.softmax(torch.from_numpy(generator.normal(size=(2, 4099)) * 2).float(), dim=-1)
    owners = np.arange(200) % 2
    found = sampler()._race(weights, owners, keys, sparse=False)
    assert found.tolist() == race(weights.numpy()[owners], keys, sparse=False).tolist()


def test_of_equal_scores_the_first_wins_and_weights_of_0_never() -> None:
    keys = np.array([[3, 4]] * 2, dtype=np.uint32)
    one = torch.zeros(1, 9000)
    one[0, 8999] = 1e-30
    assert sampler()._race(one, np.array([0, 0]), keys, sparse=True).tolist() == [8999, 8999]


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


def test_rows_of_which_nothing_can_be_drawn_plainly_get_an_error_and_a_token_of_the_vocabulary() -> None:
    kinds = [{"seed": seed} for seed in range(5)]
    logits = make_logits("normal", len(kinds), 2100)
    sound = sampler().launch(logits, rows_of(kinds)).wait()
    logits[0, 3], logits[2, 2099], logits[3] = math.nan, math.inf, -math.inf
    launched = sampler().launch(logits, rows_of(kinds))
    found = launched.wait()
    assert [each.error is None for each in found] == [False, True, False, False, True]
    assert [found[1], found[4]] == [sound[1], sound[4]]
    assert all(0 <= each < 2100 for each in launched.token_ids.tolist())
