"""The sampler on CUDA, its race interpreted: the reference's tokens, whoever is beside a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo.devices.cuda.runtime import CudaRuntime
from octavo.devices.cuda.sampler import CudaSampler
from octavo.devices.reference.sampler import ReferenceSampler
from octavo.sampling.filters import default_filters
from octavo.sampling.processors import default_processors
from octavo.sampling.random import race
from tests.conformance.test_sampling import KINDS, make_logits, rows_of, token_ids


def sampler() -> CudaSampler:
    processors, filters = default_processors(), default_filters()
    return CudaSampler(CudaRuntime(), torch.device("cpu"), lambda values: values.tolist, processors, filters)


@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "barred", "large"])
@pytest.mark.parametrize("vocab_size", [5, 65, 9001])
def test_tokens_are_those_of_the_reference(vocab_size: int, kind: str) -> None:
    logits = make_logits(kind, len(KINDS), vocab_size)
    expected = ReferenceSampler().sample(logits.clone(), rows_of(KINDS))
    found = sampler().sample(logits.clone(), rows_of(KINDS))
    assert [*map(token_ids, found)] == [*map(token_ids, expected)]
    assert sampler().sample(logits[7:9].clone(), rows_of(KINDS[7:9])) == found[7:9]


def test_many_draws_are_those_of_the_reference_and_of_float64() -> None:
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 1 << 32, (500, 2), dtype=np.uint32)
    weights = torch.softmax(torch.from_numpy(generator.normal(size=(2, 4099)) * 2).float(), dim=-1)
    owners = np.arange(500) % 2
    found = sampler()._race(weights, owners, keys, sparse=False)
    assert found.tolist() == race(weights.numpy()[owners], keys, sparse=False).tolist()


def test_of_equal_scores_the_first_wins_and_weights_of_0_never() -> None:
    keys = np.array([[3, 4]] * 2, dtype=np.uint32)
    one = torch.zeros(1, 9000)
    one[0, 8999] = 1e-30
    assert sampler()._race(one, np.array([0, 0]), keys, sparse=True).tolist() == [8999, 8999]
