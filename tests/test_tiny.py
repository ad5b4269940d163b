"""The library in sixty lines: what you can do with the model that ships with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo import LLM, OctavoError, OutputKind, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_gpu_blocks_override=256, threads=1) as llm:
        yield llm


def test_prompts_are_continued_in_their_order(llm: LLM) -> None:
    outputs = llm.generate(["Once upon a time", "The fox"], GREEDY)
    assert [output.prompt for output in outputs] == ["Once upon a time", "The fox"]


def test_questions_are_answered_through_the_chat_template(llm: LLM) -> None:
    [output] = llm.chat([{"role": "user", "content": "Who are you?"}], SamplingParams(temperature=0, max_tokens=100))
    assert "octavo" in output.outputs[0].text


def test_without_a_seed_a_program_draws_the_same_in_each_run(llm: LLM) -> None:
    assert llm.engine.config.model.seed == 0


def test_seeded_request_draws_the_same_alone_and_in_a_batch(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=24)
    [alone] = llm.generate("One day", seeded)
    batch = llm.generate(["Far away", "One day", "A bear"], [GREEDY, seeded, SamplingParams(max_tokens=9)])
    assert batch[1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_several_continuations_share_one_prompt(llm: LLM) -> None:
    [output] = llm.generate("In the forest", SamplingParams(n=3, seed=1, max_tokens=12))
    assert len({completion.text for completion in output.outputs}) == 3


def test_stop_string_ends_the_text(llm: LLM) -> None:
    [output] = llm.generate("Once upon a time", SamplingParams(temperature=0, stop=".", max_tokens=100))
    assert (output.outputs[0].stop_reason, "." in output.outputs[0].text) == (".", False)


def test_what_cannot_be_done_is_said(llm: LLM) -> None:
    refused, fine = llm.generate(["", "Hello"], GREEDY)
    assert refused.error is not None
    assert fine.error is None
    with pytest.raises(OctavoError, match="did you mean temperature"):
        SamplingParams(temprature=0.5)


def test_engine_can_be_driven_step_by_step(llm: LLM) -> None:
    llm.engine.add_request("mine", "Once", SamplingParams(max_tokens=4, output_kind=OutputKind.DELTA))
    tokens: list[int] = []
    while llm.engine.has_unfinished_requests():
        tokens += [token_id for output in llm.engine.step() for token_id in output.outputs[0].token_ids]
    assert len(tokens) == 4


def test_queue_in_process_has_no_limits() -> None:
    with LLM(num_gpu_blocks_override=64, threads=1, max_num_seqs=1, max_queued_requests=3, max_queued_tokens=4) as llm:
        outputs = llm.generate(["Once upon a time"] * 8, SamplingParams(max_tokens=1))
    assert [output.error for output in outputs] == [None] * 8
