"""Any schedule gives a request the bits of a lonely run: tokens, log-probabilities, finish reasons, all `==`.

On the compiled kernels, for every format of weights and cache, under a sliding window, and with recurrent layers.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from octavo import LLM, SamplingParams
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.engine.engine_core import EngineCore
from octavo.scheduler.policies import POLICIES
from octavo.simulate.replay import Replay
from tests.conformance.runtimes import LEVELS
from tests.fakes.accounting import check_scheduler
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.draft_heads import write_head
from tests.fakes.proposer import LOOKUPS, take_all

pytestmark = pytest.mark.skipif(not LEVELS, reason="exact by construction are the compiled kernels, absent here")

FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "fp8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "int8 weights": {"dtype": "bfloat16", "quantization": "int8"},
    "int4 weights": {"dtype": "bfloat16", "quantization": "int4"},
    "sliding window": {"dtype": "bfloat16", "model": "mistral"},
    "recurrent layers": {"dtype": "bfloat16", "model": "qwen3_next"},
}
LONG = ("int8 cache", "int8 weights", "recurrent layers")
"""Formats that are run with the long tests; each time, test_tensor_parallel.py has the first two."""
BLOCK_SIZES = (4, 16)
VOCABULARY = 300
PREFIX = [7 * i % VOCABULARY for i in range(40)]
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
Answer = tuple[list[CompletionOutput], Any]
"""Sequences and prompt log-probabilities."""


class Asked(NamedTuple):
    """A request, how it comes (`keywords` of `add_request`), and what happens after it."""

    prompt: list[int]
    params: SamplingParams
    keywords: dict[str, Any]
    adapter: str | None
    num_steps: int
    event: str | None
    """Before those steps: "pin", "reset", "abort" or "resume" (the request before it leaves and comes back)."""


@st.composite
def requests(draw: st.DrawFn) -> list[Asked]:
    """Prompts, many of which begin alike, with every way of choosing tokens and of standing in a queue."""
    found = []
    for number in range(draw(st.integers(6, 10))):
        shared, own = draw(st.sampled_from([0, 0, 21, 40])), random.Random(draw(st.integers(0, 1 << 16)))
        prompt = PREFIX[:shared] + [own.randrange(VOCABULARY) for _ in range(draw(st.sampled_from([1, 15, 25, 40])))]
        regex = draw(st.sampled_from(["(ab|cd)+", "[a-c]{9,40}x"]))
        kind = draw(st.sampled_from(["greedy", "drawn", "several", "best", "repeating", "beams", "scored", "form"]))
        max_tokens = draw(st.sampled_from([1, 16, 40, 40]))
        common: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": 2, "ignore_eos": True}
        common["stop_token_ids"] = draw(st.sampled_from([(), (), tuple(range(0, VOCABULARY, 11))]))
        chosen: dict[str, dict[str, Any]] = {
            "greedy": {"temperature": 0.0, "repetition_penalty": draw(st.sampled_from([1.0, 1.3]))},
            "drawn": {"seed": number, "top_p": 0.9, "top_k": draw(st.sampled_from([0, 40]))},
            "several": {"seed": number, "n": 3, "min_p": 0.02, "stop": draw(st.sampled_from([(), LETTERS]))},
            "best": {"seed": number, "n": 1, "best_of": 3},
            "repeating": {
                "seed": number, "n": 2, "allowed_token_ids": (5, 6), "logprob_token_ids": (9, 5),
                "repetition_detection": {"min_pattern_size": 2, "max_pattern_size": 5, "min_count": 3},
            },
            "beams": {
                "n": 2, "best_of": 2, "use_beam_search": True,
                "early_stopping": draw(st.sampled_from([True, False, "never"])),
                "length_penalty": draw(st.sampled_from([1.0, 0.0, 2.0])),
            },
            "scored": {"seed": number, "prompt_logprobs": 1, "stop": draw(st.sampled_from([(), LETTERS]))},
            "form": {
                "seed": number, "n": 2, "repetition_penalty": 1.3, "ignore_eos": False, "stop_token_ids": (),
                "structured_outputs": StructuredOutputsParams(regex=regex),
            },
        }  # fmt: skip
        asked = Asked(
            prompt,
            SamplingParams(**common | chosen[kind]),
            {
                "priority": draw(st.integers(0, 2)),
                "tenant": draw(st.sampled_from([None, "x", "y"])),
                "first_token_deadline_s": draw(st.sampled_from([None, 0.3, 100.0])),
                "cache_salt": draw(st.sampled_from([None, None, "salt"])),
            },
            draw(st.sampled_from([None, None, "a", "b"])),
            draw(st.sampled_from([0, 0, 1, 4])),
            draw(st.sampled_from([None, None, None, "pin", "reset", "abort", "resume"])),
        )
        found.append(asked)
    return found


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    """Ways of running them that change nothing but the schedule."""
    is_chunked = draw(st.sampled_from([True, True, False]))
    policy = draw(st.sampled_from(list(POLICIES)))
    preemption_mode = draw(st.sampled_from(["recompute", "swap", "classic", "auto"]))
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    return {
        "block_size": block_size,
        "num_gpu_blocks_override": draw(st.sampled_from([288, 288, 288, 800])) // block_size,
        # without chunked prefill the longest prompt has to fit
        "max_num_batched_tokens": draw(st.sampled_from([16, 64, 512] if is_chunked else [80, 512])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 7])) if is_chunked else 0,
        "max_num_seqs": draw(st.sampled_from([5, 16, 16])),
        "enable_chunked_prefill": is_chunked,
        "delay_factor": 0.0 if is_chunked else draw(st.sampled_from([0.0, 1.0])),
        "scheduling_policy": policy,
        "priority_ageing": draw(st.sampled_from([0.0, 0.01])) if policy == "priority" else 0.0,
        "tenant_weights": draw(st.sampled_from([{}, {"x": "3"}])) if policy == "fair-share" else {},
        "max_bypasses": draw(st.sampled_from([0, 2])) if is_chunked else 0,
        "num_lookahead_slots": draw(st.sampled_from([0, 0, 1, 5])),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.01, 0.3])),
        "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
        "prefix_cache_eviction": draw(st.sampled_from(["lru", "cost"])),
        "prefix_cache_size": draw(st.sampled_from([None, None, 0, 1 << 14])),
        "preemption_mode": preemption_mode,
        "swap_space": draw(st.sampled_from([2e-5, 0.01] if preemption_mode == "swap" else [0.0, 2e-5, 0.01])),
        "max_steps_in_flight": draw(st.integers(1, 3)),
        "threads": draw(st.sampled_from([1, 2])),
        "enforce_eager": draw(st.booleans()),
        "guesses": draw(st.sampled_from([None, None, *LOOKUPS, "draft_model", "eagle"])),
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family: one that sees everything, one with states, and one that sees the last 20 tokens."""
    paths = {}
    for family, own in (("qwen3", {}), ("qwen3_next", {}), ("mistral", {"head_dim": 16, "sliding_window": 20})):
        path = tmp_path_factory.mktemp(family)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, **own}
        make_checkpoint(family, path, **sizes)
        paths[family] = write_byte_tokenizer(path)
    paths["draft"] = tmp_path_factory.mktemp("draft")
    make_checkpoint("qwen3", paths["draft"], vocab_size=VOCABULARY, num_hidden_layers=1)
    write_byte_tokenizer(paths["draft"])
    paths["head"] = write_head(tmp_path_factory.mktemp("head"), VOCABULARY, is_third=False)
    return paths


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=[pytest.mark.long] * (each in LONG)) for each in FORMATS],
)
def alone(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Any:
    """The format, and a function that answers what a request gives by itself: no cache, one step at a time.

    Sums are taken in an order that depends on the size of blocks, so there is an engine for each.
    """
    known: dict[tuple[Any, ...], Answer] = {}
    keywords = FORMATS[request.param]
    with ExitStack() as stack:
        engines = {
            block_size: stack.enter_context(
                load(
                    checkpoints, keywords, block_size=block_size, num_gpu_blocks_override=3200 // block_size,
                    enable_prefix_caching=False, threads=1, enforce_eager=True,
                )
            )
            for block_size in BLOCK_SIZES
        }  # fmt: skip

        def run(prompt: list[int], params: SamplingParams, block_size: int) -> Answer:
            key = (*prompt, str(params), block_size)
            if key not in known:
                known[key] = answer_of(engines[block_size].generate(prompt, params)[0])
            return known[key]

        yield keywords, run


def answer_of(output: RequestOutput) -> Answer:
    return output.outputs, output.prompt_logprobs


def load(checkpoints: dict[str, Path], keywords: dict[str, Any], **more: Any) -> LLM:
    own = {"model": str(checkpoints[keywords.get("model", "qwen3")])}
    return LLM(**({"max_model_len": 128, "num_gpu_blocks_override": 200} | keywords | own | more))


def check_that_any_schedule_is_exact(
    alone: Any, checkpoints: dict[str, Path], batch: list[Asked], options: dict[str, Any], max_loras: int
) -> None:
    keywords, run_alone = alone
    options = dict(options)
    if guesses := options.pop("guesses"):
        models = {"draft_model": "draft", "eagle": "head"}
        named: dict[str, Any] = {"prompt_lookup_min": 1}
        if guesses in models:
            named = {"model": str(checkpoints[models[guesses]])}
            # its layers see all tokens: those with a window get fewer blocks, and requests must fit them alone
            options["num_gpu_blocks_override"] *= 2
        options["speculative_config"] = {"method": guesses, "num_speculative_tokens": 5, **named}
    outputs: dict[str, RequestOutput] = {}
    with TemporaryDirectory() as folder, load(checkpoints, keywords, **options, record_trace=f"{folder}/run") as llm:
        engine = llm.engine
        core = engine.core
        assert isinstance(core, EngineCore)
        if guesses:
            assert llm.config.speculative is not None
            take_all(core, llm.config.speculative, seed=len(batch))
        if max_loras:
            # requests cannot name adapters yet, nor engines limit them
            planner = core.scheduler._planner
            planner._config = dataclasses.replace(planner._config, max_loras=max_loras)

        def step() -> None:
            outputs.update({each.request_id: each for each in engine.step()})
            check_scheduler(core.scheduler)
            adapters = {group.request.adapter for group in core.scheduler.running} - {None}
            assert len(adapters) <= (max_loras or len(adapters))

        for number, asked in enumerate(batch):
            engine.add_request(str(number), asked.prompt, asked.params, **asked.keywords)
            group = core.scheduler.groups.get(str(number))
            if group is not None and max_loras:
                core.scheduler.waiting.remove(group)  # its place there depends on its adapter
                group.request.adapter = asked.adapter
                core.scheduler.waiting.push(group)
            if asked.event == "pin":
                engine.call("pin_prefix", PREFIX, 0.05)
            elif asked.event == "reset":
                engine.call("reset_prefix_cache")
            elif asked.event == "abort" and number:
                engine.abort_request(str(number - 1))
            elif asked.event == "resume" and (moved := engine._output.to_resume(str(number - 1))) is not None:
                core.abort_requests([moved.request_id])
                core.add_request(moved)
            for _ in range(asked.num_steps):
                step()
        while engine.has_unfinished_requests():
            step()
        core.scheduler.block_manager.pins.clear()
        assert core.scheduler.stats().num_used_blocks == core.scheduler.stats().num_used_host_blocks == 0
        if not max_loras:
            engine.shutdown()
            assert Replay(f"{folder}/run").run().first_difference is None
    for number, asked in enumerate(batch):
        found = outputs[str(number)]
        if any(each.finish_reason == "abort" for each in found.outputs):
            continue
        if found.error is not None:
            # the second: a machine that is busy computes so slowly that the prompt alone takes longer
            assert found.error.code in ("deadline_unreachable", "deadline_too_short")
            continue
        assert answer_of(found) == run_alone(asked.prompt, asked.params, options["block_size"]), (number, options)


# a smaller failing batch is seldom worth the minutes that shrinking takes
@settings(
    max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(batch=requests(), options=engines(), max_loras=st.sampled_from([0, 0, 1]))
def test_any_schedule_gives_the_bits_of_a_lonely_run(
    alone: Any, checkpoints: dict[str, Path], batch: list[Asked], options: dict[str, Any], max_loras: int
) -> None:
    check_that_any_schedule_is_exact(alone, checkpoints, batch, options, max_loras)


@pytest.mark.long
@pytest.mark.timeout(0)
@settings(
    max_examples=300, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)  # fmt: skip
@given(batch=requests(), options=engines(), max_loras=st.sampled_from([0, 0, 1]))
def test_many_schedules_give_the_bits_of_a_lonely_run(
    alone: Any, checkpoints: dict[str, Path], batch: list[Asked], options: dict[str, Any], max_loras: int
) -> None:
    check_that_any_schedule_is_exact(alone, checkpoints, batch, options, max_loras)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("alone", ["bfloat16", "int4 weights"], indirect=True)
@settings(
    max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(batch=requests(), options=engines(), guesses=st.sampled_from([*LOOKUPS, "draft_model", "eagle"]))
def test_guesses_over_ranks_give_the_bits_of_a_lonely_run(
    alone: Any, checkpoints: dict[str, Path], batch: list[Asked], options: dict[str, Any], guesses: str
) -> None:
    ranks = {"tensor_parallel_size": 2, "threads": 1, "guesses": guesses}
    check_that_any_schedule_is_exact(alone, checkpoints, batch, options | ranks, 0)


def test_the_formats_differ(checkpoints: dict[str, Path]) -> None:
    """Otherwise the runs above would all test the same numbers."""
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=5, ignore_eos=True)
    found = {}
    for name, keywords in FORMATS.items():
        with load(checkpoints, keywords, threads=1) as llm:
            found[name] = llm.generate(PREFIX, params)[0].outputs[0].cumulative_logprob
    for (one, first), (other, second) in itertools.combinations(found.items(), 2):
        assert first != second, (one, other)
