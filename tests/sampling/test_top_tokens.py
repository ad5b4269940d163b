from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.sampling_params import SamplingParams
from octavo.sampling.filters import filtered_probabilities, scale
from octavo.sampling.top_tokens import filtered_top_tokens, num_top_tokens

PARAMS = st.builds(
    SamplingParams,
    top_k=st.sampled_from([0, 1, 5, 32, 33, 400]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 1e-4, 0.1, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)


def make_logits(seed: int, vocab_size: int, spread: float, coarse: bool) -> torch.Tensor:
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    return logits.bfloat16().float() if coarse else logits


@settings(max_examples=200)
@given(
    params=PARAMS,
    seed=st.integers(0, 100),
    vocab_size=st.sampled_from([7, 32, 33, 500]),
    spread=st.sampled_from([0.0, 0.5, 4.0]),
    coarse=st.booleans(),
)
def test_decided_top_tokens_keep_what_the_filters_keep(
    params: SamplingParams, seed: int, vocab_size: int, spread: float, coarse: bool
) -> None:
    scaled = scale(make_logits(seed, vocab_size, spread, coarse), [params.temperature])
    top = filtered_top_tokens(scaled, [params])
    if not top.is_decided[0]:
        return
    from_top = torch.zeros(vocab_size).index_put((top.token_ids[0],), top.weights[0])
    expected = filtered_probabilities(scaled, [params])[0]
    assert torch.equal(from_top > 0, expected > 0)
    torch.testing.assert_close(from_top / from_top.sum(), expected / expected.sum())


@pytest.mark.parametrize(
    ("params", "spread", "decided"),
    [
        ({"top_k": 20}, 0.0, False),  # all tie
        ({"top_k": 20}, 2.0, True),
        ({"top_k": 400}, 2.0, False),
        ({"top_p": 0.9}, 6.0, True),
        ({"top_p": 0.9}, 0.1, False),
        ({"min_p": 0.2}, 4.0, True),
        ({"top_k": 400, "min_p": 0.2}, 4.0, True),
    ],
)
def test_likely_tokens_decide_and_broad_ones_do_not(params: dict[str, float], spread: float, decided: bool) -> None:
    scaled = scale(make_logits(1, 1000, spread, coarse=False), [1.0])
    assert filtered_top_tokens(scaled, [SamplingParams(**params)]).is_decided == [decided]  # type: ignore[arg-type]


def test_a_small_vocabulary_is_all_looked_at() -> None:
    assert num_top_tokens(20) == 20
    assert filtered_top_tokens(torch.zeros(1, 20), [SamplingParams(top_p=0.5)]).is_decided == [True]


def test_few_tokens_of_large_vocabularies_are_looked_at() -> None:
    assert [num_top_tokens(size) for size in (500, 4096, 32_000, 152_000)] == [32, 64, 256, 256]
