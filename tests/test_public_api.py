"""The names that people import, and the arguments that they know from other engines."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import octavo


@pytest.mark.parametrize("name", octavo.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(octavo, name) is not None
    assert name in dir(octavo)


def test_every_public_name_has_one_home() -> None:
    assert set(octavo.__all__) == set(octavo._HOME) | {"__version__"}


def test_the_names_that_vllm_exports_are_there() -> None:
    theirs = """LLM PromptType TextPrompt TokensPrompt SamplingParams RequestOutput CompletionOutput PoolingOutput
    PoolingRequestOutput EmbeddingOutput EmbeddingRequestOutput ClassificationOutput ClassificationRequestOutput
    ScoringOutput ScoringRequestOutput LLMEngine EngineArgs AsyncLLMEngine AsyncEngineArgs PoolingParams
    RequestOutputKind FlexibleArgumentParser PoolerConfig LoRARequest AsyncLLM StructuredOutputsParams"""
    assert set(theirs.split()) <= set(octavo.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'octavo' has no attribute 'Nothing'"):
        octavo.Nothing  # type: ignore[attr-defined]  # noqa: B018


def test_importing_octavo_loads_nothing_heavy() -> None:
    code = "import sys, octavo; print(sorted(n for n in sys.modules if n.split('.')[0] not in sys.stdlib_module_names))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    foreign = {name for name in eval(done.stdout) if not name.startswith("_")}
    assert {"torch", "msgspec", "starlette", "tokenizers", "cyclopts"}.isdisjoint(foreign)
    assert "octavo.llm" not in foreign


def test_offline_use_loads_nothing_of_the_server() -> None:
    code = "import sys, octavo; octavo.LLM, octavo.LLMEngine; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"prometheus_client", "starlette", "uvicorn", "transformers", "torch"}.isdisjoint(done.stdout.split())


def test_engine_arguments_have_their_well_known_names() -> None:
    names = inspect.signature(octavo.EngineArgs).parameters
    assert {
        "model",
        "tokenizer",
        "revision",
        "dtype",
        "seed",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
        "gpu_memory_utilization",
        "swap_space",
        "num_gpu_blocks_override",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "enforce_eager",
        "trust_remote_code",
        "served_model_name",
        "tensor_parallel_size",
    } <= set(names)


def test_llm_methods_take_their_well_known_arguments() -> None:
    assert {"prompts", "sampling_params", "use_tqdm"} <= set(inspect.signature(octavo.LLM.generate).parameters)
    assert {"messages", "sampling_params", "use_tqdm"} <= set(inspect.signature(octavo.LLM.chat).parameters)


def test_engine_methods_have_their_well_known_names() -> None:
    for name in ("from_args", "from_engine_args", "add_request", "abort_request", "step"):
        assert callable(getattr(octavo.LLMEngine, name))
    for name in ("has_unfinished_requests", "get_num_unfinished_requests"):
        assert callable(getattr(octavo.LLMEngine, name))
    for name in ("from_engine_args", "generate", "abort", "get_tokenizer", "check_health", "shutdown"):
        assert callable(getattr(octavo.AsyncLLMEngine, name))
    assert octavo.AsyncEngineArgs is octavo.EngineArgs
    assert callable(octavo.AsyncLLM.generate)


def test_sampling_parameters_have_their_well_known_names() -> None:
    assert {
        "n",
        "best_of",
        "use_beam_search",
        "length_penalty",
        "early_stopping",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "logprobs",
        "logprob_token_ids",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "repetition_detection",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "structured_outputs",
        "detokenize",
        "output_kind",
    } <= set(octavo.SamplingParams.__struct_fields__)
