"""The library with the model that ships with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_gpu_blocks_override=256, threads=1) as llm:
        yield llm


def test_questions_are_answered_through_the_chat_template(llm: LLM) -> None:
    [output] = llm.chat([{"role": "user", "content": "Who are you?"}], SamplingParams(temperature=0, max_tokens=100))
    assert "octavo" in output.outputs[0].text


def test_without_a_seed_a_program_draws_the_same_in_each_run(llm: LLM) -> None:
    assert llm.engine.config.model.seed == 0


def test_queue_in_process_has_no_limits() -> None:
    with LLM(num_gpu_blocks_override=64, threads=1, max_num_seqs=1, max_queued_requests=3, max_queued_tokens=4) as llm:
        outputs = llm.generate(["Once upon a time"] * 8, SamplingParams(max_tokens=1))
    assert [output.error for output in outputs] == [None] * 8
