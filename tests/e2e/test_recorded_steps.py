"""Steps from recordings give the tokens and log-probabilities, `==`, of steps that Python runs."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.attention.metadata import ModelInput
from octavo.devices.cpu.recorded_model import RecordedModel
from tests.conformance.runtimes import LEVELS
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.proposer import take_all
from tests.fakes.whole_engines import core_of

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")

PARAMS = [
    SamplingParams(max_tokens=3 + 7 * i % 29, ignore_eos=True, temperature=i % 2, seed=i, logprobs=2) for i in range(9)
]
"""Sequences end one after the other: steps have from nine rows to one."""
PROMPTS = [[(11 * i + 7 * j) % 250 for j in range(1 + 9 * i)] for i in range(len(PARAMS))]


@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [
        *((family, dtype, None) for family in ("llama", "qwen3", "opt", "gpt2") for dtype in ("bfloat16", "float32")),
        ("youtu", "bfloat16", None),
        ("qwen3", "bfloat16", "int8"),
        ("opt", "float32", "int4"),
    ],
)
def test_whole_outputs_are_equal_with_and_without_recordings(
    family: str, dtype: str, quantization: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(write_byte_tokenizer(make_checkpoint(family, tmp_path, vocab_size=260, eos_token_id=257)))
    answers = []
    for enforce_eager in (True, False):
        with (
            caplog.at_level(logging.INFO),
            LLM(
                model=path,
                dtype=dtype,
                quantization=quantization,
                enforce_eager=enforce_eager,
                max_num_seqs=16,
                max_num_batched_tokens=24,
                kv_cache_memory="8MiB",
            ) as llm,
        ):
            twice = [llm.generate([{"prompt_token_ids": p} for p in PROMPTS], PARAMS, use_tqdm=False) for _ in "ab"]
        answers += [[output.outputs[0] for output in outputs] for outputs in twice]
    assert not [line for line in caplog.messages if "not recorded" in line]
    assert all(answer == answers[0] for answer in answers[1:])


def test_steps_that_verify_guesses_are_repeated_from_recordings() -> None:
    """A number of tokens and rows runs in Python once, and is recorded the second time."""
    guess = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}
    with LLM("octavo-tiny", num_gpu_blocks_override=64, speculative_config=guess) as llm:
        core = core_of(llm)
        assert llm.config.speculative is not None
        take_all(core, llm.config.speculative)
        model = core.executor._runner.model  # type: ignore[attr-defined]
        assert isinstance(model, RecordedModel)
        called, plain = Counter[tuple[int, int]](), model._model

        def counted(batch: ModelInput) -> Any:
            called[len(batch.token_ids), len(batch.attention[0].query_starts) - 1] += 1
            return plain(batch)

        model._model = counted  # type: ignore[assignment]
        params = [SamplingParams(seed=seed, max_tokens=120, ignore_eos=True) for seed in range(3)]
        llm.generate(["Once upon a time", "A dog", "Two"], params, use_tqdm=False)
        stats = core.scheduler.stats()
        assert stats.num_drafts > 30
        assert max(called.values()) <= 2
        assert sum(called.values()) < stats.num_steps / 2
