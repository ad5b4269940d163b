"""A slow reader gets all that a quick one gets."""

from __future__ import annotations

from typing import Any

from octavo.core.outputs import CompletionOutput, Logprob, RequestError, RequestMetrics, RequestOutput
from octavo.engine.deltas import merge_deltas


def delta_output(*outputs: CompletionOutput, **fields: Any) -> RequestOutput:
    values = {"request_id": "r", "prompt": "ab", "prompt_token_ids": [97, 98], "finished": False, **fields}
    return RequestOutput(outputs=list(outputs), **values)


def test_merging_outputs_loses_nothing_of_them() -> None:
    prompt_logprobs: list[dict[int, Logprob] | None] = [None, {98: Logprob(-1.0)}]
    a, b = ({token: Logprob(-0.5)} for token in (1, 2))
    parts = [
        CompletionOutput(index=1, text="x", token_ids=[1], cumulative_logprob=-0.5, logprobs=[a], text_offsets=[0]),
        CompletionOutput(
            index=1,
            text="y",
            token_ids=[2],
            cumulative_logprob=-1.0,
            logprobs=[b],
            text_offsets=[1],
            finish_reason="stop",
            stop_reason=7,
        ),
        CompletionOutput(index=0, text="z", token_ids=[3]),
    ]
    earlier = delta_output(parts[0], prompt_logprobs=prompt_logprobs, num_generated_tokens=1)
    news: dict[str, Any] = {
        "finished": True,
        "num_cached_tokens": 3,
        "cache_miss_reason": "new",
        "num_generated_tokens": 3,
        "metrics": RequestMetrics(arrival_time=1.0),
        "error": RequestError("no"),
    }
    whole = CompletionOutput(
        index=1,
        text="xy",
        token_ids=[1, 2],
        cumulative_logprob=-1.0,
        logprobs=[a, b],
        text_offsets=[0, 1],
        finish_reason="stop",
        stop_reason=7,
    )
    expected = delta_output(parts[2], whole, prompt_logprobs=prompt_logprobs, **news)
    assert merge_deltas(earlier, delta_output(*parts[1:], **news)) == expected
    # they come with whichever output is the first
    first_later = delta_output(*parts[1:], prompt_logprobs=prompt_logprobs, **news)
    assert merge_deltas(delta_output(parts[0]), first_later) == expected
