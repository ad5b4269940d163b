"""A request that goes on in another core gives what an undisturbed one gives: text, log-probabilities and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import cycle
from typing import Any

import msgspec
import pytest

from octavo import LLM, SamplingParams
from octavo.core.messages import EngineCoreRequest
from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import OutputKind
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.output.output_processor import OutputProcessor
from tests.conformance.runtimes import LEVELS

pytestmark = pytest.mark.skipif(not LEVELS, reason="exact by construction are the compiled kernels, absent here")

Move = Callable[[LLMEngine], None]
CUTS = (1, 5, 2, 12)
"""Steps before the core is lost, in turns for the kinds of requests and for the engines."""
FEW = 6
"""Sequences at once where blocks are scarce."""
PROMPTS = ("Once upon a time there was a small", "The", "Once upon a time there was a big red")
KINDS: dict[str, dict[str, Any]] = {
    "drawn": {"logprobs": 2, "temperature": 1.1},
    "greedy": {"temperature": 0.0, "logprobs": 0},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.9, "repetition_penalty": 1.2, "logprobs": 1},
    "min tokens": {"min_tokens": 12, "temperature": 1.3, "stop": ["e"], "max_tokens": 25},
    "stop strings": {"stop": [" there was", "and the little", "day, "], "logprobs": 0},
    "stop strings that are shown": {"stop": [" the ", ". "], "include_stop_str_in_output": True, "min_tokens": 4},
    "bad words": {"bad_words": [" the", "was"], "logit_bias": {5: 2.0}, "temperature": 1.5},
    "prompt": {"prompt_logprobs": 1, "logprobs": 1},
    "three of different lengths": {"n": 3, "stop": ["a", " b"], "logprobs": 1, "temperature": 1.4, "min_tokens": 2},
    "best of three": {"n": 1, "best_of": 3, "temperature": 1.2},
    "beams": {"n": 2, "best_of": 3, "use_beam_search": True, "temperature": 0.0, "max_tokens": 12, "logprobs": 1},
    "repetition": {
        "allowed_token_ids": (5, 6),
        "max_tokens": 40,
        "logprob_token_ids": (9, 5),
        "repetition_detection": {"min_pattern_size": 2, "max_pattern_size": 4, "min_count": 3},
    },
    "one token": {"max_tokens": 1, "logprobs": 1, "n": 2},
}
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "without a prefix cache": {"enable_prefix_caching": False},
    "pieces and preemption": {
        "max_num_batched_tokens": 16, "block_size": 4, "num_gpu_blocks_override": 24, "max_num_seqs": FEW,
    },
    "swapping, nothing in pieces": {
        "enable_chunked_prefill": False, "block_size": 4, "num_gpu_blocks_override": 24, "max_num_seqs": FEW,
        "preemption_mode": "swap", "swap_space": 0.01,
    },
}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=[pytest.mark.long] * (each == "without a prefix cache")) for each in ENGINES],
)
def engine(request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    options = {"dtype": "bfloat16", "max_model_len": 96, "num_gpu_blocks_override": 256, "max_steps_in_flight": 2}
    engine = LLM("octavo-tiny", **{**options, **ENGINES[request.param]}).engine
    yield engine
    stats, options = engine.core.stats(), ENGINES[request.param]
    assert (stats.num_preemptions > 0) == (options.get("max_num_seqs") == FEW)
    assert stats.num_preemptions_by_swap > 0 or "swap_space" not in options
    engine.shutdown()


def run(engine: LLMEngine, kind: str, cut: int | None = None, move: Move | None = None) -> list[dict[str, Any]]:
    """What is read of the requests, which are moved after `cut` steps. Those that are moved are streamed."""
    output_kind = OutputKind.FINAL_ONLY if move is None else OutputKind.DELTA
    engine.reset_prefix_cache()
    add(engine, kind, output_kind)
    read: list[RequestOutput] = []
    num_steps = 0
    while engine.has_unfinished_requests():
        if num_steps == cut and move is not None:
            move(engine)
        read += engine.step()
        num_steps += 1
    found = [joined(read, f"{number}") for number in range(len(PROMPTS))]
    if engine.config.scheduler.max_num_seqs == FEW:
        for each in found:
            del each["num_cached_tokens"]  # those that wait at the cut find another cache
    return found


def add(engine: LLMEngine, kind: str, output_kind: OutputKind) -> None:
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(**{"max_tokens": 20, "seed": number, "output_kind": output_kind, **KINDS[kind]})
        engine.add_request(f"{number}", prompt, params)


def joined(read: list[RequestOutput], request_id: str) -> dict[str, Any]:
    """All that was read of a request, without times."""
    outputs = [output for output in read if output.request_id == request_id]
    sequences: dict[int, dict[str, Any]] = {}
    for piece in (piece for output in outputs for piece in output.outputs):
        have, more = sequences.get(piece.index), msgspec.structs.asdict(piece)
        for name in ("text", "token_ids", "logprobs", "text_offsets"):
            if have is not None and more[name] is not None:
                more[name] = have[name] + more[name]
        sequences[piece.index] = more
    prompt_logprobs = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert len(prompt_logprobs) <= 1
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    last = outputs[-1]
    return {
        "sequences": sequences,
        "prompt_logprobs": prompt_logprobs,
        "num_prompt_tokens": len(last.prompt_token_ids),
        "num_cached_tokens": last.num_cached_tokens,
        "num_generated_tokens": last.num_generated_tokens,
        "error": last.error,
    }


def lose_the_core(engine: LLMEngine) -> list[EngineCoreRequest]:
    """Forget all that the core holds and has in flight, and return the requests as the front has them."""
    request_ids = list(engine._output._requests)
    requests = [request for each in request_ids if (request := engine._output.to_resume(each)) is not None]
    engine.core.abort_requests(request_ids)
    engine.reset_prefix_cache()
    return [msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineCoreRequest) for request in requests]


def move_to_another_core(engine: LLMEngine) -> None:
    for request in lose_the_core(engine):
        engine.core.add_request(request)


def move_to_another_front(engine: LLMEngine) -> None:
    requests = lose_the_core(engine)
    engine._output = OutputProcessor(engine.tokenizer)
    for request in requests:
        engine._output.add(request, None)
    engine.core.add_requests(requests)


def test_repetitions_end_requests_before_their_limit(engine: LLMEngine) -> None:
    reasons = [each["sequences"][0]["finish_reason"] for each in run(engine, "repetition")]
    assert set(reasons) == {"repetition"}


@pytest.fixture(scope="module")
def undisturbed(engine: LLMEngine) -> Callable[[str], list[dict[str, Any]]]:
    return cache(partial(run, engine))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_moved_request_gives_is_what_an_undisturbed_one_gives(
    request: pytest.FixtureRequest, engine: LLMEngine, kind: str, undisturbed: Callable[[str], list[dict[str, Any]]]
) -> None:
    place = list(KINDS).index(kind) + list(ENGINES).index(request.node.callspec.params["engine"])
    assert run(engine, kind, CUTS[place % len(CUTS)], move_to_another_core) == undisturbed(kind)


# of the best of three nothing is delivered before its end, and then only the rest would be
@pytest.mark.parametrize(("kind", "cut"), [(k, c) for k, c in zip(KINDS, cycle((5, 2))) if k != "best of three"])
def test_another_front_delivers_the_rest(
    engine: LLMEngine, kind: str, cut: int, undisturbed: Callable[[str], list[dict[str, Any]]]
) -> None:
    assert run(engine, kind, cut, move_to_another_front) == undisturbed(kind)


@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tensor", "pipeline"]
)
def test_what_one_rank_has_begun_several_ranks_continue(ranks: dict[str, int]) -> None:
    options = {"dtype": "bfloat16", "max_model_len": 96, "num_gpu_blocks_override": 64, "threads": 1}
    with LLM("octavo-tiny", **options) as one:
        undisturbed = run(one.engine, "three of different lengths")
        begun: list[RequestOutput] = []
        one.engine.reset_prefix_cache()
        add(one.engine, "three of different lengths", OutputKind.DELTA)
        for _ in range(3):
            begun += one.engine.step()
        requests = lose_the_core(one.engine)
    with LLM("octavo-tiny", **options, **ranks) as several:
        for request in requests:
            several.engine._output.add(request, None)
        several.engine.core.add_requests(requests)
        while several.engine.has_unfinished_requests():
            begun += several.engine.step()
    assert [joined(begun, f"{number}") for number in range(len(PROMPTS))] == undisturbed
