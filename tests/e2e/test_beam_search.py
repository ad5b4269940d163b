"""Beam search against that of transformers (5.x, `generate` with num_beams): ids and scores, in float32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.core.outputs import RequestOutput
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import load_oracle, make_checkpoint

VOCABULARY = 300
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("beams")
    make_checkpoint("llama", path, vocab_size=VOCABULARY)
    return write_byte_tokenizer(path)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    return load_oracle(checkpoint)


def prompts() -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(1, VOCABULARY) for _ in range(count)] for count in (1, 6, 13)]


def expected(
    oracle: Any, prompt: list[int], width: int, end: list[int], **settings: Any
) -> list[tuple[list[int], float]]:
    with torch.inference_mode():
        found = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=end or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
    answers = []
    for ids, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        stop = next((place for place, token in enumerate(ids) if token in end), len(ids) - 1)
        answers.append((ids[: stop + 1], score))
    return answers


def answers_of(output: RequestOutput, length_penalty: float) -> list[tuple[list[int], float]]:
    assert output.error is None
    return [
        (each.token_ids, (each.cumulative_logprob or 0.0) / len(each.token_ids) ** length_penalty)
        for each in output.outputs
    ]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_ids_and_scores_are_those_of_transformers(
    checkpoint: Path, oracle: Any, width: int, length_penalty: float, early_stopping: bool | str
) -> None:
    end = random.Random(width).sample(range(1, VOCABULARY), 40)  # so many that beams do finish
    with LLM(model=str(checkpoint), block_size=4, num_gpu_blocks_override=200, threads=1, dtype="float32") as llm:
        outputs = llm.beam_search(
            prompts(),
            width,
            max_tokens=MAX_TOKENS,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            stop_token_ids=end,
            ignore_eos=True,
        )
    for prompt, output in zip(prompts(), outputs, strict=True):
        wanted = expected(oracle, prompt, width, end, length_penalty=length_penalty, early_stopping=early_stopping)
        found = answers_of(output, length_penalty)
        assert [ids for ids, _ in found] == [ids for ids, _ in wanted]
        assert [score for _, score in found] == pytest.approx([score for _, score in wanted], abs=1e-4)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_beams_that_give_way_find_the_same(checkpoint: Path, mode: str) -> None:
    def run(num_blocks: int) -> tuple[list[list[tuple[list[int], float]]], int]:
        with LLM(
            model=str(checkpoint), block_size=4, num_gpu_blocks_override=num_blocks, max_model_len=48, threads=1,
            preemption_mode=mode, swap_space=0.01,
        ) as llm:  # fmt: skip
            found = llm.beam_search(prompts() * 3, 4, max_tokens=20, ignore_eos=True)
            return [answers_of(output, 1.0) for output in found], llm.engine.stats.num_preemptions

    roomy, none = run(400)
    tight, some = run(26)
    assert tight == roomy
    assert none == 0 < some
