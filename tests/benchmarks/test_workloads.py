"""What engines are asked to do, and the arithmetic that makes figures of what was seen."""

from __future__ import annotations

import pytest

from benchmarks.workloads import WORKLOADS, Workload, figures, named_workloads, summarize
from octavo.errors import ConfigError


def test_prompts_have_the_shape_of_the_workload_and_share_what_it_says() -> None:
    workload = WORKLOADS["E"]
    prompts = workload.prompts(32_000, 0)
    assert [len(prompt) for prompt in prompts] == [1056] * 16
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1
    assert len({tuple(prompt[1024:]) for prompt in prompts}) == 16
    assert all(0 <= token < 32_000 for prompt in prompts for token in prompt)


def test_prompts_are_new_in_each_repetition_and_the_same_in_each_run() -> None:
    workload = WORKLOADS["E"]
    assert workload.prompts(1000, 1) == workload.prompts(1000, 1)
    assert workload.prompts(1000, 1)[0][:16] != workload.prompts(1000, 2)[0][:16]
    again = workload.prompts(1000, 1, variant=1)
    assert again[0][:1024] == workload.prompts(1000, 1)[0][:1024]
    assert again[0][1024:] != workload.prompts(1000, 1)[0][1024:]


def test_prompts_are_cut_to_a_context_that_is_a_little_too_short() -> None:
    assert WORKLOADS["D"].fitted(2048).prompt_len == 1984
    assert WORKLOADS["D"].fitted(4096) == WORKLOADS["D"]


@pytest.mark.parametrize(("name", "max_model_len"), [("A", 128), ("E", 1024)])
def test_a_workload_that_does_not_fit_is_refused_by_name(name: str, max_model_len: int) -> None:
    with pytest.raises(ConfigError, match=f"workload {name} .* the context is {max_model_len}"):
        WORKLOADS[name].fitted(max_model_len)


def test_an_unknown_workload_is_refused_with_those_that_there_are() -> None:
    assert [workload.name for workload in named_workloads("C1, A")] == ["C1", "A"]
    with pytest.raises(ConfigError, match="'C2' is not a workload.*A, B, C1"):
        named_workloads("A,C2")


def test_figures_of_a_run_with_known_times() -> None:
    events = [(12.0, 0, 1), (14.0, 0, 1), (14.0, 1, 1), (15.0, 0, 1), (15.0, 1, 1), (17.0, 1, 1)]
    found = figures(Workload("X", 2, 10, 3), 10.0, events, 18.0)
    assert found == {
        "wall": 8.0,
        "ttft_first": 2.0,
        "ttft_mean": 3.0,
        "ttft_last": 4.0,
        "out_tps": 6 / 8,
        "total_tps": 26 / 8,
        "prefill_tps": 20 / 4,
        "decode_tps": 3 / 3,
        "step_ms": 1500.0,
    }


def test_a_workload_of_one_token_has_no_decoding() -> None:
    found = figures(Workload("X", 1, 8, 1), 0.0, [(2.0, 0, 1)], 2.0)
    assert found["prefill_tps"] == 4.0
    assert not {"decode_tps", "step_ms"} & set(found)


def test_a_run_with_a_token_too_few_is_no_run() -> None:
    with pytest.raises(ValueError, match=r"requests got \[1, 2\] tokens, each was to get 2"):
        figures(Workload("X", 2, 8, 2), 0.0, [(1.0, 0, 2), (1.0, 1, 1)], 2.0)


def test_summaries_are_medians_with_their_range() -> None:
    summary = summarize([{"wall": 3.0}, {"wall": 1.0, "step_ms": 5.0}, {"wall": 2.0}])
    assert summary == {"wall": {"med": 2.0, "min": 1.0, "max": 3.0}, "step_ms": {"med": 5.0, "min": 5.0, "max": 5.0}}
