"""Ranks in processes of their own give the bits of one rank, on one machine and on two."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import EngineDeadError
from tests.executor.test_conformance import join_elsewhere

PROMPTS = ["Once upon a time", "The little"]
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=3, n=2, logprobs=2, presence_penalty=0.3)
SETTINGS: dict[str, Any] = {"model": "octavo-tiny", "max_num_seqs": 8, "kv_cache_memory": 32 << 20, "swap_space": 0}


def generate(llm: LLM) -> list[Any]:
    found = [
        (output.token_ids, output.cumulative_logprob, output.logprobs)
        for each in llm.generate(PROMPTS, PARAMS)
        for output in each.outputs
    ]
    llm.engine.core.shutdown()
    return found


@pytest.fixture(scope="module")
def of_one_rank() -> list[Any]:
    return generate(LLM(**SETTINGS))


@pytest.mark.parametrize(
    "size", ["tensor_parallel_size", pytest.param("pipeline_parallel_size", marks=pytest.mark.cold)]
)
def test_two_processes_give_the_bits_of_one(size: str, of_one_rank: list[Any]) -> None:
    assert generate(LLM(**SETTINGS, **{size: 2})) == of_one_rank


def test_two_machines_give_the_bits_of_one(tmp_path: Path, of_one_rank: list[Any]) -> None:
    settings = join_elsewhere(tmp_path, module="octavo.executor.rank_process")
    assert generate(LLM(**SETTINGS, **settings, pipeline_parallel_size=2)) == of_one_rank


def test_ranks_end_when_nothing_refers_to_the_engine() -> None:
    llm = LLM(**SETTINGS, tensor_parallel_size=2)
    executor: Any = llm.engine.core.executor
    process = executor._ranks[0].process
    del llm
    gc.collect()
    assert process.poll() == 0


def test_a_rank_that_is_killed_ends_the_engine_by_name() -> None:
    llm = LLM(**SETTINGS, tensor_parallel_size=2)
    executor: Any = llm.engine.core.executor
    os.kill(executor._ranks[0].process.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"rank 1 was killed \(signal 9\)"):
        llm.generate(PROMPTS, PARAMS)
    llm.engine.core.shutdown()


def test_a_rank_that_is_stopped_ends_with_the_engine() -> None:
    llm = LLM(**SETTINGS, tensor_parallel_size=2, distributed_timeout_seconds=1)
    executor: Any = llm.engine.core.executor
    process = executor._ranks[0].process
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=r"rank 1 .*: stopped by a signal"):
        llm.generate(PROMPTS, PARAMS)
    assert process.poll() == -signal.SIGKILL
