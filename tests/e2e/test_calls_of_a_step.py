"""What a plain model's step costs in calls: features that are off add none."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import octavo
from octavo import LLM, SamplingParams
from octavo.engine.llm_engine import LLMEngine
from tests.conformance.runtimes import LEVELS
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")

PACKAGE = str(Path(octavo.__file__).parent)
STEPS = 16
"""Tokens of a block: as many steps as it takes to fill one in each sequence."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    checkpoint = make_checkpoint("llama", tmp_path_factory.mktemp("plain"), vocab_size=260, eos_token_id=257)
    path = str(write_byte_tokenizer(checkpoint))
    with LLM(model=path, max_num_seqs=16, kv_cache_memory="8MiB", block_size=16) as llm:
        yield llm.engine


def add(engine: LLMEngine, name: str, num_tokens: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    engine.add_request(name, {"prompt_token_ids": [(len(name) + 7 * j) % 250 for j in range(num_tokens)]}, params)


def end_all(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def calls(run: Callable[[], Any]) -> Counter[str]:
    """Return how often each function of octavo was called, by package."""
    counted: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            counted[frame.f_code.co_filename[len(PACKAGE) + 1 :].partition("/")[0]] += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counted


@pytest.mark.parametrize(("num_sequences", "most"), [(1, 210), (8, 626)])
def test_a_decode_step(engine: LLMEngine, num_sequences: int, most: int) -> None:
    for i in range(num_sequences):
        add(engine, f"r{i}", 9 + i, 50)
    for _ in range(8):
        engine.step()
    counted = calls(lambda: [engine.step() for _ in range(STEPS)])
    end_all(engine)
    assert counted.total() / STEPS <= most, counted  # five of them let threads take turns


def test_a_prompt(engine: LLMEngine) -> None:
    add(engine, "once", 200, 1)
    end_all(engine)
    add(engine, "prompt", 200, 1)
    counted = calls(lambda: end_all(engine))
    # 16 of them count how the request went, once it has ended, five let threads take turns, and one is for torch
    assert counted.total() <= 736, counted
