"""Stop strings end beams in the core, whatever becomes of the beams, and a replay needs no tokenizer for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.core.messages import EngineCoreOutput, EngineCoreRequest
from octavo.engine.engine_core import EngineCore
from octavo.engine.output.output_processor import OutputProcessor
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import CheckpointError
from octavo.simulate.replay import Replay
from tests.fakes.byte_tokenizer import byte_tokenizer
from tests.fakes.engine import make_core, make_request

STOPS = ("!", "0", '")', "\ufffd")
"""Tokens 33, 48, and 34 before 41, of the 50 that the fake model draws."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("byte"))


def searches(num_requests: int = 6, **params: object) -> list[EngineCoreRequest]:
    values: dict[str, object] = {"n": 2, "use_beam_search": True, "max_tokens": 24, "stop": STOPS, **params}
    return [make_request(f"r{number}", [number, 7, 7, 8], **values) for number in range(num_requests)]


def run(core: EngineCore, requests: list[EngineCoreRequest]) -> dict[str, EngineCoreOutput]:
    for request in requests:
        core.add_request(request)
    outputs = {}
    while core.has_unfinished():
        outputs.update({output.request_id: output for output in core.step().outputs if output.finished})
    return outputs


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [200, 16])
def test_a_beam_ends_with_the_token_that_completes_a_stop_string(
    tmp_path: Path, tokenizer: Tokenizer, num_blocks: int, depth: int
) -> None:
    requests = searches()
    core = make_core(
        num_blocks=num_blocks, depth=depth, record_to=tmp_path / "run", open_tokenizer=lambda: tokenizer
    )  # fmt: skip
    outputs = run(core, requests)
    core.shutdown()
    assert (core.stats().num_preemptions > 0) is (num_blocks < 200)
    reasons = []
    for request in requests:
        front = OutputProcessor(tokenizer)
        front.add(request, None)
        (shown,) = front.process([outputs[request.request_id]]).read()
        for delta, one in zip(outputs[request.request_id].deltas, shown.outputs, strict=True):
            text = bytes(delta.token_ids).decode()
            stopped = [stop for stop in STOPS if text.endswith(stop)]
            assert not any(stop in text[:-1] for stop in STOPS)
            assert (one.token_ids, one.finish_reason) == (delta.token_ids, "stop" if stopped else "length")
            assert one.stop_reason == (stopped[0] if stopped else None)
            assert one.text == text.removesuffix(stopped[0] if stopped else "")
            assert stopped or len(text) == 24
            reasons.append(one.stop_reason)
    assert {"0", None} <= set(reasons)
    replayed = Replay(tmp_path / "run").run()
    assert (replayed.num_requests, replayed.first_difference) == (6, None)


def test_the_same_is_found_whatever_room_there_is(tokenizer: Tokenizer) -> None:
    for params in ({}, {"min_tokens": 9}, {"logprobs": 20}):
        runs = [
            run(make_core(num_blocks=num_blocks, open_tokenizer=lambda: tokenizer), searches(**params))
            for num_blocks in (200, 16)
        ]
        roomy, tight = ({name: output.deltas for name, output in each.items()} for each in runs)
        assert roomy == tight
        lengths = [len(delta.token_ids) for deltas in roomy.values() for delta in deltas]
        assert min(lengths) >= params.get("min_tokens", 1)


def test_the_tokenizer_is_opened_once_and_only_in_need(tokenizer: Tokenizer) -> None:
    opened = []
    core = make_core(num_blocks=200, open_tokenizer=lambda: opened.append(1) or tokenizer)  # type: ignore[func-returns-value]
    run(core, [*searches(stop=()), make_request("drawn", [1], stop=STOPS)])
    assert opened == []
    run(core, searches())
    assert opened == [1]


def unreadable() -> Tokenizer:
    raise CheckpointError("there is no tokenizer.json any more")


@pytest.mark.parametrize(("opens", "words"), [(None, "this core has no tokenizer"), (unreadable, "no tokenizer.json")])
def test_without_a_tokenizer_it_is_refused_and_others_go_on(opens: Callable[[], Tokenizer] | None, words: str) -> None:
    core = make_core(open_tokenizer=opens)
    outputs = run(core, [*searches(1), make_request("other", [1, 2])])
    error = outputs["r0"].error
    assert error is not None
    assert words in error.message
    assert error.field == "stop"
    assert outputs["other"].error is None
