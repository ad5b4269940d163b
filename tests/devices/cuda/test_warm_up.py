"""The largest steps at start: what they launch, and that what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo import LLM, SamplingParams
from octavo.devices import DEVICES
from octavo.devices.cuda.graphs import GraphedModel
from octavo.devices.cuda.runtime import launch_by_triton
from octavo.errors import ConfigError
from tests.devices.cuda.interpreted import NAME, InterpretedCuda
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint

SIZES: Any = {"device": "cuda", "dtype": "float32", "max_model_len": 32, "num_gpu_blocks_override": 9}
STEPS: Any = {"max_num_seqs": 3, "max_num_batched_tokens": 20}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    return write_byte_tokenizer(make_checkpoint("qwen3", tmp_path / "model", vocab_size=300, num_hidden_layers=1))


@pytest.mark.long
def test_the_largest_steps_are_made_at_start_and_change_no_token(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt: Any = {"prompt_token_ids": [5, 6, 7]}
    asked = SamplingParams(max_tokens=4, temperature=0.9, seed=1, ignore_eos=True)
    with LLM(str(path), **SIZES, **STEPS) as llm:
        expected = llm.generate([prompt], asked, use_tqdm=False)[0].outputs
    models: list[GraphedModel] = []
    make = GraphedModel.__init__
    monkeypatch.setattr(
        GraphedModel, "__init__", lambda self, *parts, **how: models.append(self) or make(self, *parts, **how)
    )
    monkeypatch.setattr(InterpretedCuda, "warms_up", True)
    with LLM(str(path), **SIZES, **STEPS) as llm:
        measured, used = ([step for step in each._steps.values() if step.graph] for each in models)
        sizes = sorted(len(step.batch.token_ids) for step in measured)
        assert sizes == [1, 4, 4], "three are filled up, whether they draw in the graph or behind it"
        assert sorted(len(step.batch.token_ids) for step in used) == [4, 4], "captured again over the real caches"
        assert llm.generate([prompt], asked, use_tqdm=False)[0].outputs == expected


@pytest.mark.long
def test_no_kernel_that_draws_is_launched_first_by_a_request(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[tuple[str, Any]] = set()

    def launch(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launched.add((kernel, constants.get("STEP")))
        launch_by_triton(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(InterpretedCuda, "launcher", lambda self, is_invariant: launch)
    monkeypatch.setattr(InterpretedCuda, "warms_up", True)
    prompt: Any = {"prompt_token_ids": [5, 6, 7]}
    with LLM(str(path), **SIZES, **STEPS) as llm:
        at_start = set(launched)
        for filters in ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
            asked = SamplingParams(max_tokens=2, seed=1, ignore_eos=True, **filters)
            llm.generate([prompt], asked, use_tqdm=False)
    assert {each for each in launched if each[0].startswith(("sampling", "filters"))} <= at_start


def test_a_step_that_does_not_fit_is_refused_by_number(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(self: Any, batch: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(GraphedModel, "__call__", call)
    monkeypatch.setattr(InterpretedCuda, "warms_up", True)
    with pytest.raises(ConfigError, match=r"out of memory in a step of 20 tokens of 3 sequences, beside weights of"):
        LLM(str(path), **SIZES, **STEPS)
