"""Pipeline stages give the bits of one rank: tokens, log-probabilities, texts and finish reasons, all `==`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.outputs import CompletionOutput
from octavo.scheduler.scheduler import Scheduler
from octavo.worker.start.loading import Stage
from tests.conformance.runtimes import LEVELS
from tests.distributed.threads import memory_meshes, thread_meshes
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.proposer import ToyProposer
from tests.fakes.rank_threads import ThreadRanks, llm_of_ranks
from tests.fakes.whole_engines import core_of

pytestmark = pytest.mark.skipif(not LEVELS, reason="exact by construction are the compiled kernels, absent here")

VOCABULARY = 300
WINDOW_IN_ONE = ["full_attention", "sliding_attention", "full_attention"]
SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 3}
WIDE = {"hidden_size": 64, "intermediate_size": 128}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo_hybrid": ("olmo_hybrid", WIDE),
    "deepseek_v4": ("deepseek_v4", {"hidden_size": 64, "num_hidden_layers": 4}),
    "glm5_next": ("glm5_next", {"hidden_size": 64}),
    "mistral_large4": (
        "mistral_large4",
        {"hidden_size": 64, "num_hidden_layers": 5, "kv_source_layers": None, "indexer_types": None},
    ),
    "llama": ("llama", WIDE),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True, **WIDE}),
    "qwen3 with a window in one layer": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": WINDOW_IN_ONE, "head_dim": 16, **WIDE},
    ),
    "qwen2": ("qwen2", WIDE),
    "mistral": ("mistral", {"sliding_window": 20, "head_dim": 16, **WIDE}),
    "gpt2": ("gpt2", {}),
    "nemotron-nas": ("nemotron-nas", {"hidden_size": 64, "num_hidden_layers": 5}),
    "modernbert-decoder": ("modernbert-decoder", WIDE),
    "opt": ("opt", {}),
    "opt with late norms and projections": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "qwen4_exp": ("qwen4_exp", {"hidden_size": 64}),
}
LONG = ("gpt2", "opt", "qwen2", "qwen4_exp")
"""Families of which others have all parts, and one whose operators are torch's."""
PROMPTS = [[7 * i % VOCABULARY for i in range(length)] for length in (1, 15, 16, 40, 23, 33)] * 2
PARAMS = [
    SamplingParams(temperature=0.0, logprobs=2, repetition_penalty=1.3, max_tokens=24, ignore_eos=True),
    SamplingParams(seed=1, top_p=0.9, top_k=40, n=3, logprobs=0, max_tokens=24, ignore_eos=True),
    SamplingParams(seed=2, frequency_penalty=1.0, min_tokens=20, stop_token_ids=tuple(range(0, 300, 5)), max_tokens=40),
    SamplingParams(seed=3, bad_words=("a", "b", "cd"), logit_bias={100: 3.0, 200: -5.0}, prompt_logprobs=1, logprobs=1),
    SamplingParams(seed=4, min_p=0.02, stop=tuple("abcdefghijklm"), max_tokens=40),
    SamplingParams(n=2, best_of=3, use_beam_search=True, max_tokens=12, logprobs=1),
] * 2
COMMON: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 96}
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 40, "max_num_seqs": 24}
"""A pool in which requests are preempted."""


def answers(llm: LLM) -> list[tuple[list[CompletionOutput], Any]]:
    return [(each.outputs, each.prompt_logprobs) for each in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint, and what one rank answers."""
    family, overrides = FAMILIES[request.param]
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(family, path, **{**SIZES, **overrides})
    write_byte_tokenizer(path)
    with LLM(str(path), **COMMON, num_gpu_blocks_override=64, threads=1) as llm:
        return path, answers(llm)


@pytest.mark.parametrize(
    ("model", "tensor", "pipeline", "preemption_mode"),
    [
        # each family in one way, which is the other one for its neighbour, and the rest with the long tests
        pytest.param(name, *way, marks=[pytest.mark.long] * (place % 2 != number or name in LONG))
        for place, name in enumerate(FAMILIES)
        for number, way in enumerate([(1, 3, "swap"), (2, 2, "recompute")])
    ],
    indirect=["model"],
)
def test_stages_give_the_bits_of_one_rank(model: Any, tensor: int, pipeline: int, preemption_mode: str) -> None:
    path, expected = model
    meshes = memory_meshes if tensor > 1 else thread_meshes
    with llm_of_ranks(path, tensor, pipeline, meshes, preemption_mode=preemption_mode, **COMMON, **SMALL) as llm:
        assert answers(llm) == expected
        stats = llm.engine.call("stats")
        assert stats["num_preemptions"] > 0
        assert (stats["num_preemptions_by_swap"] > 0) == (preemption_mode == "swap")


def test_every_stage_records_its_decode_steps(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, **SIZES)
    write_byte_tokenizer(tmp_path)
    with llm_of_ranks(tmp_path, pipeline=3, **COMMON) as llm:
        answers(llm)
        assert isinstance(llm.engine.core.executor, ThreadRanks)
        parts = [rank.plan.cache.block_bytes for rank in llm.engine.core.executor.workers]
        assert llm.engine.ready.cache.block_bytes == sum(parts) == 3 * parts[0]
        for rank in llm.engine.core.executor.workers:
            assert isinstance(rank._runner.model, Stage)
            assert any(rank._runner.model._model._recordings.values())  # type: ignore[attr-defined]


def test_two_stages_in_processes_give_the_bits_of_one_rank(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path, **SIZES, **WIDE, tie_word_embeddings=True)
    write_byte_tokenizer(tmp_path)
    found = []
    for num_stages in (1, 2):
        with LLM(str(tmp_path), pipeline_parallel_size=num_stages, **COMMON, **SMALL, threads=1) as llm:
            found.append(answers(llm))
            assert llm.config.scheduler.max_steps_in_flight == num_stages
    assert found[0] == found[1]


def test_drafts_over_stages_change_no_bit(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, **SIZES, **WIDE)
    write_byte_tokenizer(tmp_path)
    prompts, params = PROMPTS[:5], PARAMS[:5]
    with LLM(str(tmp_path), **COMMON, threads=1) as llm:
        expected = [each.outputs for each in llm.generate(prompts, params, use_tqdm=False)]
    tokens = [{each.index: each.token_ids for each in sequences} for sequences in expected]
    with llm_of_ranks(tmp_path, pipeline=2, **COMMON) as llm:
        core = core_of(llm)
        plain = core.scheduler
        proposer = ToyProposer(lambda group: tokens[prompts.index(group.request.prompt_token_ids)], 0.7)
        core.scheduler = Scheduler(plain.block_manager, plain.config, sends_tokens=True, proposer=proposer)
        assert [each.outputs for each in llm.generate(prompts, params, use_tqdm=False)] == expected
        assert proposer.num_proposed > 0
