"""Large answers: encoded in slices, their bytes are those of one piece."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest

from octavo.core.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.server.logprobs import CompletionLogprobs
from octavo.server.routes.completions import CompletionChoice, CompletionResponse
from octavo.server.sending import SLICE, LargeResponses, encode, free, is_large
from octavo.server.usage import PromptTokensDetails, Usage


def answer(num_choices: int, num_tokens: int) -> CompletionResponse:
    logprobs = CompletionLogprobs(
        tokens=["ä"] * num_tokens,
        token_logprobs=[None, *[-0.5] * num_tokens][:num_tokens],
        top_logprobs=[{"a": -0.5, "b": -1.5}] * num_tokens,
        text_offset=list(range(num_tokens)),
    )
    positions = [None, *({3: Logprob(-0.5, 1, "a")} for _ in range(num_tokens))]
    choices = [
        CompletionChoice(index=index, text="x", logprobs=logprobs, prompt_logprobs=positions)
        for index in range(num_choices)
    ]
    return CompletionResponse(
        id="1",
        created=2,
        model="m",
        choices=choices,
        usage=Usage(1, 2, 3, PromptTokensDetails(0, 0, 1)),
        system_fingerprint="",
    )


@pytest.mark.parametrize(("num_choices", "num_tokens"), [(1, 3), (1, SLICE), (2, SLICE + 1), (SLICE + 1, 1), (1, 2000)])
def test_slices_make_the_same_bytes(num_choices: int, num_tokens: int) -> None:
    value = answer(num_choices, num_tokens)
    assert encode(value) == msgspec.json.encode(value)


def test_what_was_sent_is_freed_object_by_object() -> None:
    value = answer(2, 3)
    [choice, _] = value.choices
    free(value)
    assert (value.choices, choice.prompt_logprobs, choice.logprobs.top_logprobs) == ([], [], [])  # type: ignore[union-attr]
    assert choice.logprobs.tokens == ["ä"] * 3  # type: ignore[union-attr]


@pytest.mark.parametrize(("num_choices", "num_tokens"), [(256, 8), (16, 100), (2, 500)])
def test_no_call_encodes_many_short_lists(num_choices: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, sizes, encode_whole = msgspec.json.encode(answer(num_choices, num_tokens)), [], msgspec.json.encode

    def encode_noted(value: object) -> bytes:
        sizes.append(len(encode_whole(value)) if isinstance(value, list) else 0)
        return encode_whole(value)

    monkeypatch.setattr(msgspec.json, "encode", encode_noted)
    assert encode(answer(num_choices, num_tokens)) == expected
    assert 0 < max(sizes) < 100 * SLICE < len(expected)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_tokens", "num_logprobs", "expected"),
    [
        (0, SLICE, 1, False),
        (0, SLICE + 1, 0, True),
        (SLICE, 1, 1, True),
        (60, 60, 20, False),
        (2, 200, 21, True),
        (2, 2, 3000, True),
    ],
)
def test_large_responses_are_those_of_many_tokens_or_many_logprobs(
    num_prompt_tokens: int, num_tokens: int, num_logprobs: int, expected: bool
) -> None:
    position = {i: Logprob(-0.5, i + 1, "a") for i in range(num_logprobs)}
    output = RequestOutput(
        request_id="1",
        prompt=None,
        prompt_token_ids=[0] * num_prompt_tokens,
        outputs=[CompletionOutput(index=0, text="", token_ids=[0] * num_tokens, logprobs=[position] * num_tokens)],
        finished=True,
        prompt_logprobs=[None, *[position] * (num_prompt_tokens - 1)] if num_prompt_tokens else None,
    )
    assert is_large([output]) == expected


def test_large_responses_are_built_in_a_thread() -> None:
    async def run() -> None:
        assert await LargeResponses().build(threading.get_ident) != threading.get_ident()

    asyncio.run(run())
