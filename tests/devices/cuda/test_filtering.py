"""Draws from what filters keep, their kernels interpreted: the reference's tokens, whoever is beside a row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo.devices.cuda.kernels import filters
from octavo.devices.cuda.runtime import launch_by_triton
from octavo.devices.reference.sampler import ReferenceSampler
from octavo.sampling.filters import default_filters
from tests.conformance.test_sampling import make_logits, rows_of
from tests.devices.cuda.sanitizer import sanitized
from tests.devices.cuda.test_sampler import sampler
from tests.sampling.test_definitions import DropsTheLikeliest

FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 7, "temperature": 0.2},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01, "temperature": 1.7},
    {"top_k": 10_000, "top_p": 0.7},
    {"top_k": 300, "top_p": 0.99, "temperature": 100.0},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 1 - 1e-12},
    {"top_p": 0.5, "temperature": 100.0},
    {"top_p": 0.95, "temperature": 1e-4},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-4, "top_p": 0.6},
]


@pytest.mark.parametrize(
    ("vocab_size", "kind", "longest"),
    [
        (5, "ties", None),
        *((2100, kind, None) for kind in ("normal", "ties", "equal", "barred", "large")),
        *((2100, kind, 30) for kind in ("normal", "ties")),
    ],
)
def test_tokens_are_those_of_the_reference(
    vocab_size: int, kind: str, longest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if longest is not None:  # else lists of so few columns are all short
        monkeypatch.setattr(filters, "LONG", longest)
    kinds = [each | {"seed": seed} for seed, each in enumerate(FILTERS)]
    logits = make_logits(kind, len(kinds), vocab_size)
    expected = ReferenceSampler().sample(logits.clone(), rows_of(kinds))
    found = sampler().launch(logits, rows_of(kinds))
    assert found.wait() == expected
    assert found.token_ids.tolist() == [each.tokens[0].token_id for each in expected]


def test_no_thread_reads_a_distance_that_another_has_written() -> None:
    with sanitized() as report:
        sampler().launch(make_logits("normal", 2, 70), rows_of([{"top_k": 5, "seed": 1}, {"seed": 2}])).wait()
    assert not report.faults


def test_long_lists_are_narrowed_before_one_program_searches_them() -> None:
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_p": 0.99, "temperature": 30.0},
        {"top_p": 0.5, "temperature": 100.0},
        {"top_p": 0.7, "min_p": 1e-4},
        {"top_p": 0.9, "temperature": 0.1},
    ]
    kinds = [each | {"seed": seed} for seed, each in enumerate(kinds)]
    logits = torch.randn(len(kinds), 9001, generator=torch.Generator().manual_seed(3))
    given: dict[str, tuple[Any, ...]] = {}

    def launch(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        given[kernel] = arguments
        launch_by_triton(kernel, grid, *arguments, **constants)

    found = sampler(launch).launch(logits, rows_of(kinds))
    assert found.wait() == ReferenceSampler().sample(logits.clone(), rows_of(kinds))
    listed, searched = given["filters.settle"][3][:, [0, 2]].T.tolist()
    assert min(listed[:4]) > filters.LONG > listed[4]
    assert searched[4] == 0
    assert all(0 < few < many / 5 for few, many in zip(searched[:4], listed, strict=False))


def test_a_row_is_drawn_alike_beside_others_and_alone() -> None:
    plain: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 8}]
    kinds = [plain[0], *({"seed": 3} | each for each in FILTERS[:4]), plain[1]]
    logits = make_logits("normal", len(kinds), 2050)
    together = sampler().launch(logits, rows_of(kinds)).wait()
    assert together == ReferenceSampler().sample(logits.clone(), rows_of(kinds))
    for place, kind in enumerate(kinds):
        assert sampler().launch(logits[place : place + 1], rows_of([kind])).wait() == [together[place]]


def test_a_row_is_drawn_by_the_same_kernels_in_a_step_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[dict[str, Any]] = [{"seed": 1}, {"seed": 2, "top_k": 7}, {"seed": 4, "num_samples": 2}]
    own, logits, drawn = [DropsTheLikeliest()], make_logits("normal", len(kinds), 300), list[int]()
    waits = sampler(filters=own)
    launch = waits.launch
    monkeypatch.setattr(waits, "launch", lambda *given: (drawn.append(len(given[1])), launch(*given))[1])
    reference = ReferenceSampler(filters=(*default_filters(), *own))
    assert waits.sample(logits.clone(), rows_of(kinds)) == reference.sample(logits.clone(), rows_of(kinds))
    assert drawn == [2]


def test_top_p_ends_with_the_token_that_reaches_it() -> None:
    # masses 1/2, 1/4, 1/8, 1/8 of which all sums are exact
    one_row = torch.full((1, 1100), -200.0)
    one_row[0, 700:704] = torch.tensor([0.0, -1.0, -2.0, -2.0]) * math.log(2)
    unfiltered = sampler().launch(one_row.repeat(60, 1), rows_of([{"seed": seed} for seed in range(60)]))
    seeds = [unfiltered.token_ids.tolist().index(token) for token in range(700, 704)]
    half, most = math.nextafter(0.5, 1), math.nextafter(0.75, 1)
    cuts = {0.25: 1, 0.5: 1, half: 2, 0.75: 2, most: 4, 0.875: 4}
    for others in ({}, {"top_k": 4, "min_p": 0.1}):
        kinds: list[dict[str, Any]] = [{"seed": seed, "top_p": top_p} | others for top_p in cuts for seed in seeds]
        found = iter(sampler().launch(one_row.repeat(len(kinds), 1), rows_of(kinds)).token_ids.tolist())
        for num_kept in cuts.values():
            tokens = [next(found) - 700 for _ in seeds]
            # whoever wins among all wins among fewer, if it is one of them
            assert tokens[:num_kept] == [*range(num_kept)]
            assert set(tokens) == set(range(num_kept))


@pytest.mark.parametrize("filters", [[{}] * 5, FILTERS[2:7]], ids=["none", "some"])
def test_rows_of_which_nothing_can_be_drawn_get_an_error_and_a_token_of_the_vocabulary(filters: list[Any]) -> None:
    kinds = [{"seed": seed} | each for seed, each in enumerate(filters)]
    logits = make_logits("normal", len(kinds), 2100)
    sound = sampler().launch(logits, rows_of(kinds)).wait()
    logits[0, 3], logits[2, 2099], logits[3] = math.nan, math.inf, -math.inf
    launched = sampler().launch(logits, rows_of(kinds))
    found = launched.wait()
    assert [each.error is None for each in found] == [False, True, False, False, True]
    assert [found[1], found[4]] == [sound[1], sound[4]]
    assert all(0 <= each < 2100 for each in launched.token_ids.tolist())
