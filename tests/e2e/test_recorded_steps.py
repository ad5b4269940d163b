"""Steps from recordings give the tokens and log-probabilities, `==`, of steps that Python runs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests.conformance.runtimes import LEVELS
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint

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
