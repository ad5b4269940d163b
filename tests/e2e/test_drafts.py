"""Drafts change no bit of a real model's results: tokens, log-probabilities, texts and finish reasons, all `==`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.outputs import CompletionOutput
from octavo.core.repetition import RepetitionDetectionParams
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.errors import ConfigError
from octavo.scheduler.scheduler import Scheduler
from tests.conformance.runtimes import LEVELS
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.exact_products import need_exact_products
from tests.fakes.proposer import LOOKUPS, ToyProposer
from tests.fakes.whole_engines import core_of

VOCABULARY = 300
RECURRENT = ("qwen3_next", "kimi_linear", "mamba2", "mamba", "lfm2")
"""Families whose layers keep states: of the gated delta rule, Mamba2, Mamba, and a convolution alone."""
PROMPTS = [[7 * i % VOCABULARY for i in range(length)] for length in (1, 15, 16, 40, 23, 31)]
PARAMS = [
    SamplingParams(temperature=0.0, logprobs=2, repetition_penalty=1.3, max_tokens=40),
    SamplingParams(seed=1, top_p=0.9, top_k=40, n=3, logprobs=0, max_tokens=24),
    SamplingParams(seed=2, frequency_penalty=1.0, min_tokens=20, stop_token_ids=tuple(range(0, 300, 5)), max_tokens=40),
    SamplingParams(seed=3, bad_words=("a", "b", "cd"), logit_bias={100: 3.0, 200: -5.0}, prompt_logprobs=1),
    SamplingParams(seed=4, min_p=0.02, stop=tuple("abcdefghijklm"), max_tokens=40),
    SamplingParams(
        seed=5,
        logprob_token_ids=(7, 250),
        allowed_token_ids=(5, 6),
        repetition_detection=RepetitionDetectionParams(min_pattern_size=2, max_pattern_size=4, min_count=3),
        max_tokens=40,
    ),
]


def answers(llm: LLM) -> list[list[CompletionOutput]]:
    return [each.outputs for each in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize(
    ("family", "device"),
    [("llama", "cpu"), ("llama", "reference"), *((each, "cpu") for each in RECURRENT)],
)
def test_drafts_change_no_bit(family: str, device: str, tmp_path: Path) -> None:
    if device == "cpu" and not LEVELS:
        pytest.skip("the compiled kernels cannot run on this machine")
    if device == "reference":
        need_exact_products(torch.bfloat16)
    sizes = {"hidden_size": 64, "intermediate_size": 128} if family == "llama" else {}
    make_checkpoint(family, tmp_path, vocab_size=VOCABULARY, **sizes)
    write_byte_tokenizer(tmp_path)
    with LLM(str(tmp_path), device=device, dtype="bfloat16", num_gpu_blocks_override=64, max_model_len=128) as llm:
        core = core_of(llm)
        expected = answers(llm)
        tokens = [{each.index: each.token_ids for each in sequences} for sequences in expected]
        plain = core.scheduler
        num_steps = plain.stats().num_steps
        for rightness in (0.0, 0.7, 1.0):
            proposer = ToyProposer(lambda group: tokens[PROMPTS.index(group.request.prompt_token_ids)], rightness)
            assert plain.reset_prefix_cache()
            core.scheduler = Scheduler(plain.block_manager, plain.config, proposer=proposer)
            assert answers(llm) == expected
            assert proposer.num_proposed > 0
        assert core.scheduler.stats().num_steps < 0.5 * num_steps


@pytest.mark.parametrize("method", LOOKUPS)
def test_speculation_changes_no_bit(method: str, tmp_path: Path) -> None:
    if not LEVELS:
        pytest.skip("the compiled kernels cannot run on this machine")
    make_checkpoint("llama", tmp_path, vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128)
    write_byte_tokenizer(tmp_path)
    options = {"dtype": "bfloat16", "num_gpu_blocks_override": 64, "max_model_len": 128}
    with LLM(str(tmp_path), **options) as llm:  # type: ignore[arg-type]
        expected = answers(llm)
    config = {"method": method, "prompt_lookup_min": 1, "num_speculative_tokens": 5}
    with LLM(str(tmp_path), speculative_config=config, **options) as llm:  # type: ignore[arg-type]
        for _ in range(2):  # the second time there are outputs of others
            assert answers(llm) == expected
        core = core_of(llm)
        assert core.stats().num_drafts > 0


def test_what_a_grammar_forces_is_guessed_and_changes_no_bit() -> None:
    if not LEVELS:
        pytest.skip("the compiled kernels cannot run on this machine")
    properties = {"name_of_the_first": {"enum": ["one", "another one"]}, "is_it_so": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    params = [SamplingParams(seed=seed, n=2, logprobs=1, max_tokens=60, structured_outputs=form) for seed in range(3)]
    prompts = ["a", "hello", "what is it"]
    texts = []
    for config in (None, {"method": "grammar"}, {"method": "ngram"}):
        with LLM("octavo-tiny", speculative_config=config, num_gpu_blocks_override=64) as llm:
            texts.append([each.outputs for each in llm.generate(prompts, params, use_tqdm=False)])
            core = core_of(llm)
            assert (core.stats().num_accepted_tokens > 0) == (config is not None)
    assert texts[0] == texts[1] == texts[2]


def test_a_device_whose_rows_are_not_exact_does_not_speculate() -> None:
    with pytest.raises(ConfigError, match=r"speculative_config is set, but the bits of a row on the device reference"):
        LLM("octavo-tiny", device="reference", speculative_config={"method": "ngram"})
