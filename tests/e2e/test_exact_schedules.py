"""Any schedule gives a request the bits of a lonely run: tokens, log-probabilities, finish reasons, all `==`.

On the compiled kernels, for every format of weights and cache, and under a sliding window.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from octavo import LLM, SamplingParams
from octavo.core.outputs import CompletionOutput
from tests.conformance.runtimes import LEVELS
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(not LEVELS, reason="exact by construction are the compiled kernels, absent here")

FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "fp8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "int8 weights": {"dtype": "bfloat16", "quantization": "int8"},
    "int4 weights": {"dtype": "bfloat16", "quantization": "int4"},
    "sliding window": {"dtype": "bfloat16", "model": "mistral"},
}
VOCABULARY = 300
PREFIX = [7 * i % VOCABULARY for i in range(40)]


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[list[int], SamplingParams]]:
    """Prompts, many of which begin alike, with every way of choosing tokens."""
    found = []
    for number in range(draw(st.integers(2, 7))):
        shared = draw(st.sampled_from([0, 0, 9, 21, 40]))
        prompt = PREFIX[:shared] + draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30))
        kind = draw(st.sampled_from(["greedy", "drawn", "several", "best", "beams"]))
        common: dict[str, Any] = {"max_tokens": draw(st.integers(1, 16)), "logprobs": 2, "ignore_eos": True}
        chosen: dict[str, dict[str, Any]] = {
            "greedy": {"temperature": 0.0, "repetition_penalty": draw(st.sampled_from([1.0, 1.3]))},
            "drawn": {"seed": number, "top_p": 0.9, "top_k": draw(st.sampled_from([0, 40]))},
            "several": {"seed": number, "n": 3, "min_p": 0.02},
            "best": {"seed": number, "n": 1, "best_of": 3},
            "beams": {"n": 2, "best_of": 2, "use_beam_search": True},
        }
        found.append((prompt, SamplingParams(**common, **chosen[kind])))
    return found


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    """Ways of running them that change nothing but the schedule."""
    return {
        "num_gpu_blocks_override": draw(st.sampled_from([24, 40, 200])),
        "max_num_batched_tokens": draw(st.sampled_from([16, 64, 512])),
        "max_num_seqs": draw(st.sampled_from([4, 8])),
        "enable_prefix_caching": draw(st.booleans()),
        "preemption_mode": draw(st.sampled_from(["recompute", "swap", "auto"])),
        "max_steps_in_flight": draw(st.integers(1, 3)),
        "threads": draw(st.sampled_from([1, 2])),
        "enforce_eager": draw(st.booleans()),
        "swap_space": 0.01,
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family: one that sees everything, and one that sees the last 20 tokens."""
    paths = {}
    for family, own in (("qwen3", {}), ("mistral", {"head_dim": 16, "sliding_window": 20})):
        path = tmp_path_factory.mktemp(family)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, **own}
        make_checkpoint(family, path, **sizes)
        paths[family] = write_byte_tokenizer(path)
    return paths


@pytest.fixture(scope="module", params=FORMATS)
def alone(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Any:
    """The format, and a function that answers what a request gives by itself: no cache, one step at a time."""
    known: dict[tuple[Any, ...], list[CompletionOutput]] = {}
    keywords = FORMATS[request.param]
    with load(checkpoints, keywords, enable_prefix_caching=False, threads=1, enforce_eager=True) as llm:

        def run(prompt: list[int], params: SamplingParams) -> list[CompletionOutput]:
            key = (*prompt, str(params))
            if key not in known:
                known[key] = llm.generate(prompt, params)[0].outputs
            return known[key]

        yield keywords, run


def load(checkpoints: dict[str, Path], keywords: dict[str, Any], **more: Any) -> LLM:
    own = {"model": str(checkpoints[keywords.get("model", "qwen3")])}
    return LLM(**({"max_model_len": 128, "num_gpu_blocks_override": 200} | keywords | own | more))


# a smaller failing batch is seldom worth the minutes that shrinking takes
@settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(batch=requests(), options=engines(), arrivals=st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_any_schedule_gives_the_bits_of_a_lonely_run(
    alone: Any,
    checkpoints: dict[str, Path],
    batch: list[tuple[list[int], SamplingParams]],
    options: dict[str, Any],
    arrivals: list[int],
) -> None:
    keywords, run_alone = alone
    with load(checkpoints, keywords, **options) as llm:
        outputs = {}
        for number, (prompt, params) in enumerate(batch):
            llm.engine.add_request(str(number), prompt, params)
            for _ in range(arrivals[number]):
                outputs.update({each.request_id: each for each in llm.engine.step()})
        while llm.engine.has_unfinished_requests():
            outputs.update({each.request_id: each for each in llm.engine.step()})
    for number, (prompt, params) in enumerate(batch):
        found = outputs[str(number)]
        assert found.error is None
        assert found.outputs == run_alone(prompt, params), (number, options)


def test_the_formats_differ(checkpoints: dict[str, Path]) -> None:
    """Otherwise the runs above would all test the same numbers."""
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=5, ignore_eos=True)
    found = {}
    for name, keywords in FORMATS.items():
        with load(checkpoints, keywords, threads=1) as llm:
            found[name] = llm.generate(PREFIX, params)[0].outputs[0].cumulative_logprob
    for (one, first), (other, second) in itertools.combinations(found.items(), 2):
        assert first != second, (one, other)
