"""What an engine cannot have produced is refused by name before it is resumed."""

from __future__ import annotations

import msgspec
import pytest

from octavo.core.messages import EngineCoreRequest
from octavo.core.resume import ResumedSequence, check_resumed
from octavo.errors import InvalidRequest
from tests.fakes.engine import make_request


def resumed(*token_ids: list[int], finish_reason: str | None = None, **params: object) -> EngineCoreRequest:
    request = make_request("r", range(5), end_token_ids=(3,), **params)
    request.resumed = tuple(
        ResumedSequence(index=index, token_ids=each, finish_reason=finish_reason)
        for index, each in enumerate(token_ids)
    )
    return request


def backwards(request: EngineCoreRequest) -> EngineCoreRequest:
    request.resumed = request.resumed[::-1]
    return request


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (resumed([1], use_beam_search=True, n=2), "a beam search cannot go on from its tokens"),
        (resumed([1], n=2), r"resumed has the indices \[0\]; give each from 0 to 1 once"),
        (backwards(resumed([1], [2], n=2)), r"resumed has the indices \[1, 0\]; .* in this order"),
        (resumed([1], [2]), r"resumed has the indices \[0, 1\]"),
        (resumed([]), r"resumed\[0\] has 0 tokens, must have 1 to 8"),
        (resumed([1], [], n=2), r"resumed\[1\] has 0 tokens"),
        (resumed([1] * 9), r"resumed\[0\] has 9 tokens, must have 1 to 8"),
        (resumed([1] * 60, max_tokens=100), r"resumed\[0\] has 60 tokens, must have 1 to 59"),
        (resumed([1, 50]), r"resumed\[0\] contains 50; the model's token ids go from 0 to 49"),
        (resumed([-1]), r"resumed\[0\] contains -1"),
        (resumed([3, 1]), r"resumed\[0\] goes on behind a token that ends it"),
        (resumed([1], finish_reason="abort"), r"resumed\[0\] has the finish_reason 'abort'"),
    ],
)
def test_what_no_engine_has_produced_is_refused_by_name(request_: EngineCoreRequest, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        check_resumed(request_, vocab_size=50, max_model_len=64)
    assert (refused.value.field, refused.value.code) == ("resumed", "cannot_be_resumed")


@pytest.mark.parametrize("request_", [resumed(), resumed([1, 3]), resumed([1] * 8), resumed([1], [2, 3], n=2)])
def test_what_an_engine_has_produced_can_be_resumed_and_sent(request_: EngineCoreRequest) -> None:
    check_resumed(request_, vocab_size=50, max_model_len=64)
    sent = msgspec.msgpack.encode(request_)
    assert msgspec.msgpack.decode(sent, type=EngineCoreRequest) == request_
