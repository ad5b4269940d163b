"""Guesses beside adapters, images, ranks and split engines: the same bits, or a refusal at start by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.core.step import RowOutput
from octavo.errors import ConfigError
from octavo.worker.drafting.drafter import Drafter
from tests.conformance.runtimes import LEVELS
from tests.e2e import test_adapters as adapters
from tests.e2e import test_images as images
from tests.e2e import test_split as split
from tests.e2e.test_draft_models import stats, take_all
from tests.e2e.test_drafts import VOCABULARY, answers
from tests.e2e.test_trained_head import HEAD
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.draft_heads import write_head
from tests.fakes.vision import make_vision_checkpoint
from tests.lora.adapter_folders import LINEAR, make_adapter

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")

METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3")


def guessing(method: str, model: Path, folder: Path) -> dict[str, Any]:
    """Return the `speculative_config` of a method for a model; a draft model has one layer, and the model's tokens."""
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    values = json.loads((model / "config.json").read_text())
    values = values.get("text_config", values)
    if method == "draft_model":
        make_checkpoint("llama", folder, vocab_size=values["vocab_size"], num_hidden_layers=1)
        shutil.copy(model / "tokenizer.json", folder)
        return config | {"model": str(folder)}
    if method in ("eagle", "eagle3"):
        head = write_head(
            folder,
            values["vocab_size"],
            is_third=method == "eagle3",
            draft_vocab=values["vocab_size"] // 2,
            hidden=values["hidden_size"],
        )
        return config | {"model": str(head)}
    return config | {"prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A model with adapters, and what they give without guesses."""
    base = make_checkpoint("llama", tmp_path_factory.mktemp("base"), vocab_size=VOCABULARY, num_hidden_layers=3)
    write_byte_tokenizer(base)
    for seed, name in enumerate(adapters.NAMES, 1):
        make_adapter(base, base / name, LINEAR, rank=4 * seed, seed=seed)
    with adapters.opened(base) as llm:
        return base, adapters.together(llm, base)


@pytest.mark.parametrize("method", METHODS)
def test_guesses_change_nothing_beside_adapters(method: str, adapted: tuple[Path, list[Any]], tmp_path: Path) -> None:
    base, expected = adapted
    with adapters.opened(base, max_loras=2, speculative_config=guessing(method, base, tmp_path / "other")) as llm:
        take_all(llm, seed=1)
        for _ in range(2):  # the second time prompts are found in the prefix cache
            assert adapters.together(llm, base) == expected
        assert stats(llm).num_draft_tokens > 10


IMAGES: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_num_seqs": 4}


def seen(llm: LLM) -> list[Any]:
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 1, "n": 2}]
    params = [SamplingParams(max_tokens=24, logprobs=2, ignore_eos=True, **way) for way in ways]
    return [images.bits(llm.generate(images.PROMPTS, each, use_tqdm=False)) for each in params]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Any]]]:
    """By family a model that reads images, and what it gives without guesses."""

    @cache
    def model(family: str) -> tuple[Path, list[Any]]:
        path = make_vision_checkpoint(family, tmp_path_factory.mktemp(family))
        with LLM(str(path), **IMAGES) as llm:
            return path, seen(llm)

    return model


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("gemma3", "draft_model"), ("paligemma", "draft_model"), ("qwen3_vl", "eagle3")),
        *(
            pytest.param(family, each, marks=pytest.mark.long)
            for family, methods in {"gemma3": ("ngram", "eagle"), "qwen3_vl": ("suffix", "draft_model")}.items()
            for each in methods
        ),
    ],
)
def test_guesses_change_nothing_of_prompts_with_images(
    reader: Any, family: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = reader(family)
    widths, extend = [], Drafter.extend

    def noted(drafter: Drafter, rows: Any, outputs: Any, states: Sequence[Tensor]) -> list[RowOutput]:
        widths.append(sum(each.shape[1] for each in states))
        return extend(drafter, rows, outputs, states)

    monkeypatch.setattr(Drafter, "extend", noted)
    options = IMAGES | {"max_num_batched_tokens": images.WIDEST.get(family, 16) + 1}
    with LLM(str(path), speculative_config=guessing(method, path, tmp_path / "other"), **options) as llm:
        take_all(llm, seed=1)  # some prompts are guessed behind later than they are computed, in pieces
        for _ in range(2):
            assert seen(llm) == expected
        assert stats(llm).num_draft_tokens > 10
    if method == "eagle3":  # which reads three streams of each token, also of an image's
        hidden_size = json.loads((path / "config.json").read_text())["text_config"]["hidden_size"]
        assert set(widths) == {3 * hidden_size}


@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize(
    "method",
    # guesses by suffixes are made on the host as those by n-grams are, and one head guesses as the other does
    [pytest.param(each, marks=[pytest.mark.long] * (each in ("suffix", "eagle", "ngram"))) for each in METHODS],
)
def test_guesses_over_ranks_change_nothing_or_are_refused(method: str, ranks: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    make_checkpoint("llama", path, vocab_size=VOCABULARY, num_hidden_layers=3)
    write_byte_tokenizer(path)
    options: dict[str, Any] = {"dtype": "bfloat16", "num_gpu_blocks_override": 64, "max_model_len": 128, "threads": 1}
    guess = guessing(method, path, tmp_path / "other")
    if "model" in guess and ranks == "pipeline_parallel_size":
        with pytest.raises(ConfigError, match=rf"method is {method}, and {ranks} is 2: .* or the method ngram"):
            LLM(str(path), speculative_config=guess, **options, **{ranks: 2})
        return
    with LLM(str(path), **options) as llm:
        expected = answers(llm)
    with LLM(str(path), speculative_config=guess, **options, **{ranks: 2}) as llm:
        take_all(llm)
        for _ in range(2):
            assert answers(llm) == expected
        assert stats(llm).num_draft_tokens > 10


def test_a_head_draws_no_guesses_over_ranks() -> None:
    config = {"method": "eagle", "model": str(HEAD), "draft_sample_method": "same_key"}
    with pytest.raises(ConfigError, match="draft_sample_method is same_key, and tensor_parallel_size is 2: .* take gr"):
        LLM("octavo-tiny", speculative_config=config, tensor_parallel_size=2)


@pytest.mark.anyio
@pytest.mark.slow
async def test_a_split_engine_with_a_draft_model_gives_what_one_without_gives() -> None:
    # steps that take equally long whatever they verify, for a beginning
    guess = {"method": "draft_model", "model": "octavo-tiny", "num_speculative_tokens": 3, "step_ms": [[1, 1], [64, 1]]}
    expected, _ = split.of_one_engine()
    async with split.started(prefill=1, decode=1, split_min_tokens=8, speculative_config=guess) as llm:
        # its part of the prompt comes with the handover: behind that it guesses as the model does
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        async for _ in llm.generate(split.prompt_of(40), params):
            pass
        assert llm.stats.num_handovers == 1
        assert llm.stats.num_accepted_tokens == llm.stats.num_draft_tokens > 0
        for _ in range(2):  # the second time prompts are found again
            assert await split.read_all(llm) == expected
        assert llm.stats.num_handovers > 10
        assert llm.stats.num_handover_mismatches == 0
