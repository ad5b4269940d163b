"""Ranks with shares of the logits sample what one rank samples from all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.core.step import TokenLogprobs
from octavo.devices.cpu.sampler import NativeSampler
from octavo.distributed.mesh import Mesh
from octavo.layers.embedding import VocabularyShare
from octavo.sampling.metadata import RowSamples, SamplingRow
from octavo.sampling.sampler import Sampler
from octavo.worker.shared_sampler import shared
from tests.conformance.runtimes import LEVELS
from tests.distributed.threads import ThreadCollectives, run_on, run_ranks, thread_meshes
from tests.sampling.sequences import sampling_row

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")

FEW: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1, "top_k": 1},
    {"seed": 2, "top_k": 7, "num_samples": 3},
    {"seed": 3, "top_k": 40, "top_p": 0.8, "min_p": 0.01, "temperature": 1.7},
    {"seed": 4, "top_k": 128, "temperature": 50.0},
]
"""Kinds of rows that are drawn from few tokens."""
MANY: list[dict[str, Any]] = [
    {"seed": 5},
    {"seed": 6, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.0, "logprobs": 3},
    {"seed": 7, "top_k": 20, "repetition_penalty": 1.5},
    {"seed": 8, "top_k": 300},
    {"temperature": 0.0, "allowed_token_ids": [3, 1], "bad_words": ()},
    {"seed": 9, "top_k": 9, "logit_bias": {2: 5.0}},
]


class Counting(ThreadCollectives):
    """Counts the elements that are gathered, and the broadcasts."""

    num_gathered = num_broadcasts = 0

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self.num_broadcasts += 1
        super().broadcast(tensor, source)

    def gather(self, share: Tensor) -> Tensor:
        self.num_gathered += share.numel() * self.size
        return super().gather(share)


def native() -> Sampler:
    from octavo.devices.cpu.runtime import CpuRuntime

    return NativeSampler(CpuRuntime.open(1, LEVELS[0]).cpu)


def share_of(logits: Tensor, mesh: Mesh) -> Tensor:
    """This rank's columns, with whatever behind the last."""
    share = VocabularyShare.of(logits.shape[1], mesh)
    own = logits[:, share.start : share.start + share.length]
    return torch.nn.functional.pad(own, (0, share.room - share.length), value=1e9).contiguous()


def drawn_by_ranks(logits: Tensor, rows: Sequence[SamplingRow], size: int) -> list[list[RowSamples]]:
    return run_ranks(size, lambda mesh: shared(native(), mesh, logits.shape[1]).sample(share_of(logits, mesh), rows))


def check(logits: Tensor, kinds: Sequence[dict[str, Any]], size: int) -> list[RowSamples]:
    rows = [sampling_row(**kind) for kind in kinds]
    expected = native().sample(logits.clone(), rows)
    first, *others = drawn_by_ranks(logits, rows, size)
    assert first == expected
    for other in others:
        assert [[token.token_id for token in row.tokens] for row in other] == [
            [token.token_id for token in row.tokens] for row in expected
        ]
        assert [row.error is None for row in other] == [row.error is None for row in expected]
    return expected


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("vocabulary", [5, 300, 40_001])
def test_ranks_draw_what_one_rank_draws(vocabulary: int, size: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    kinds = [*FEW, *MANY, *FEW]
    check(torch.randn(len(kinds), vocabulary, generator=generator) * 3, kinds, size)


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_that_tie_are_drawn_as_by_one_rank(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = FEW * 3
    for levels in (1, 3, 30):  # all tie, most tie, some tie with the last that is kept
        check(torch.randint(levels, (len(kinds), 500), generator=generator).float(), kinds, size)


def test_rows_that_are_no_numbers_are_refused_as_by_one_rank() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    logits[0, 30] = math.nan
    logits[1, 3] = math.inf
    logits[2] = -math.inf
    logits[3, 20:] = -math.inf  # a whole share
    expected = check(logits, [FEW[0], FEW[2], FEW[3], FEW[2], FEW[0], {"allowed_token_ids": [1], "bad_words": ()}], 2)
    assert [row.error is not None for row in expected] == [True, True, True, False, False, False]
    assert check(logits, [FEW[0]] * 6, 2)[3:] == check(logits[3:], [FEW[0]] * 3, 2)


def test_greedy_rows_take_one_call_of_all_ranks() -> None:
    logits = torch.randn(3, 40_000, generator=torch.Generator().manual_seed(0))
    rows = [sampling_row(temperature=0.0, num_samples=count) for count in (1, 2, 1)]
    meshes = [replace(mesh, tensor_group=counting(mesh.tensor_group)) for mesh in thread_meshes(2)]
    found = run_on(meshes, lambda mesh: shared(native(), mesh, 40_000).sample(share_of(logits, mesh), rows))
    assert found[0] == found[1] == native().sample(logits, rows)
    assert [mesh.tensor_group.num_gathered for mesh in meshes] == [3 * 2 * 2] * 2  # type: ignore[attr-defined]
    assert [mesh.tensor_group.num_broadcasts for mesh in meshes] == [0, 0]  # type: ignore[attr-defined]


def test_rows_drawn_from_few_tokens_need_no_gather_of_their_logits() -> None:
    vocabulary = 40_000
    logits = torch.randn(len(FEW), vocabulary, generator=torch.Generator().manual_seed(0))
    meshes = [replace(mesh, tensor_group=counting(mesh.tensor_group)) for mesh in thread_meshes(2)]
    rows = [sampling_row(**kind) for kind in FEW]
    run_on(meshes, lambda mesh: shared(native(), mesh, vocabulary).sample(share_of(logits, mesh), rows))
    assert all(0 < mesh.tensor_group.num_gathered < vocabulary // 10 for mesh in meshes)  # type: ignore[attr-defined]


def counting(group: Any) -> Any:
    group.__class__ = Counting
    return group


def test_descriptions_and_ranks_are_those_of_one_rank() -> None:
    logits = torch.randn(3, 301, generator=torch.Generator().manual_seed(0)) * 3
    logits[1, 200] = math.nan
    rows = [sampling_row(), sampling_row(repetition_penalty=1.2), sampling_row(logit_bias={3: 1.0})]
    alone = native()
    expected = alone.describe(logits, [3, 4, 5], 2), alone.rank(logits.clone(), rows, [4, 2, 4])

    def work(mesh: Mesh) -> tuple[list[TokenLogprobs], list[RowSamples]]:
        sampler = shared(native(), mesh, 301)
        return sampler.describe(share_of(logits, mesh), [3, 4, 5], 2), sampler.rank(
            share_of(logits, mesh), rows, [4, 2, 4]
        )

    first, other = run_ranks(2, work)
    assert str(first) == str(expected)  # one of them is NaN
    assert [math.isnan(token.logprob or 0) for token in other[0]] == [False, True, False]


def test_one_rank_samples_itself() -> None:
    sampler = native()
    assert shared(sampler, Mesh.single(), 300) is sampler
